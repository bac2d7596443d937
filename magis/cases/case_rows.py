"""Helpers to build case results: figures, peak breakdowns, and steps that do not fit into memory."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from magis.capture import Captured
from magis.cost.signature import signature
from magis.graph import Graph, every_op
from magis.planner.subject import ROUNDS_ALONE, Subject
from magis.report.text_store import code_digest
from magis.results import Case, CaseResult, Memory, Peak, Span, StepFigures, TensorLives
from magis.runtime.double_precision import FirstDifference, first_difference
from magis.runtime.measure import device_identity, is_out_of_memory, others_memory
from magis.runtime.steps import Step, whole_step
from magis.runtime.timing import alone
from magis.simulate.peak_breakdown import peak_of
from magis.simulate.simulator import MemoryProfile, replay
from magis.simulate.tensor_lives import tensor_lives
from magis.simulate.timeline import timeline
from magis.strategies.rank_step import samples_of
from magis.units import GIB, format_bytes

# Details of a case besides its figures: tensors at the peak, and time lines.


@dataclass(frozen=True, eq=False)
class Replayed:
    """A step for replay in the simulator: a captured step with eager's lifetimes, or a plan's graph with its own."""

    subject: Subject
    graph: Graph
    captured: Captured | None = None

    @property
    def _deaths(self) -> Mapping[int, int] | None:
        return None if self.captured is None else self.captured.deaths

    def _profile(self) -> MemoryProfile:
        if self.captured is not None:
            return self.subject.simulate(self.captured)
        costs = self.subject.costs(self.subject.workspaces(self.graph))
        return replay(self.graph, costs.workspace, rounding=costs.rounding)

    def first_difference(self, run: Callable[[], object]) -> FirstDifference | None:
        """Run the step by ``run``; return the first operator whose measured bytes are not the simulated ones, or
        None."""
        return first_difference(run, self.graph, self._profile())

    def at_peak(self) -> Peak:
        """Return the tensors alive at the step's peak of tensor bytes."""
        costs = self.subject.costs(self.subject.workspaces(self.graph))
        profile = self._profile()
        return peak_of(self.graph, costs.workspace, profile, deaths=self._deaths, rounding=costs.rounding)

    def spans(self) -> tuple[Span, ...]:
        """Return the step's time line, with the latencies reported for it."""
        costs = self.subject.costs(self.subject.workspaces(self.graph))
        times, profile = self.subject.predicting, self._profile()
        return timeline(self.graph, times, costs.workspace, profile, deaths=self._deaths, rounding=costs.rounding)

    def lives(self) -> TensorLives:
        """Return the step's tensors with their births and deaths."""
        costs = self.subject.costs(self.subject.workspaces(self.graph))
        times, profile = self.subject.predicting, self._profile()
        return tensor_lives(self.graph, times, costs.workspace, profile, deaths=self._deaths, rounding=costs.rounding)


NOT_RUN = "not run"
NOT_COMPARED = "not run: the original does not fit"
NOT_BOTH = "not run: original and optimized step do not fit together"
NOTABLE_BYTES = GIB
"""Threshold in bytes from which messages mention GPU memory of other processes; a CUDA context takes half of that."""

T = TypeVar("T")


@dataclass(frozen=True)
class AloneFigures:
    """Memory and times (ms) of an optimized step that ran without the original."""

    memory: Memory
    times_ms: tuple[float, ...]


def attempt(run: Callable[[], T]) -> T | None:
    """Return the result of ``run``; None if it runs out of memory, which is then freed."""
    try:
        return run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # outside of the handler: the error's frames held the step's tensors
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None


def fits_alone(subject: Subject, peak_bytes: int) -> bool:
    """Return True if a step with this peak fits into free memory besides a copy of the module, and should run."""
    if subject.simulated_only or subject.too_slow:
        return False
    return peak_bytes + subject.captured.graph.persistent_bytes() <= subject.free_bytes


def run_alone(subject: Subject, make: Callable[[], Step]) -> AloneFigures | None:
    """Return a step's measured memory and times; None if it runs out of memory."""

    def run() -> AloneFigures:
        step = make()
        once = whole_step(step)
        for _ in range(2):  # the first step makes the optimizer's state
            once()
        return AloneFigures(subject.measure(step), alone(once, ROUNDS_ALONE, subject.torch_device))

    return attempt(run)


def too_large(subject: Subject) -> str:
    """Return the message that the original needs more memory than is free."""
    return f"it needs about {format_bytes(subject.predicted_bytes)} of memory, {_format_free(subject)}"


def ran_out(subject: Subject) -> str:
    """Return the message that the original ran out of memory although it should fit."""
    peak = format_bytes(subject.original.peak_bytes)
    return f"it ran out of memory: its simulated peak is {peak}, {_format_free(subject)}"


def _format_free(subject: Subject) -> str:
    others = others_memory(subject.source.device)
    held = f", {format_bytes(others)} are held by other processes" if others >= NOTABLE_BYTES else ""
    return f"{format_bytes(subject.free_bytes)} are free{held}"


# Common parts of results.


def original_figures(subject: Subject, *, measured: bool) -> StepFigures:
    """Return the figures of eager on one rank with the whole batch; simulated only if it runs out of memory."""
    captured = subject.captured.original
    memory = attempt(lambda: subject.original_measured) if measured else None
    return StepFigures(
        subject.original,
        subject.latency_ns(captured.graph) / 1e6,
        memory,
        () if memory is None else subject.original_times_ms,
        subject.reserved_bytes(captured),
        Replayed(subject, captured.graph, captured).at_peak(),
    )


def other_result(
    case: Case, subject: Subject, original: StepFigures, optimized: StepFigures, conformance: str = ""
) -> CaseResult:
    """Return a result with the common fields: without limits and ratio, and with numbers not compared. With a text for
    ``conformance`` no step is run for a comparison with eager."""
    graph = subject.captured.original.graph
    signatures = "\n".join(signature(op, values) for op, values in every_op(graph))
    return CaseResult(
        case=case,
        dtype=subject.source.dtype,
        identity=device_identity(case.device),
        original=original,
        optimized=optimized,
        ratio=None,
        weight_bytes=subject.weight_bytes,
        persistent_bytes=subject.captured.graph.persistent_bytes(),
        memory_limit_bytes=None,
        latency_limit_ms=None,
        device_memory_bytes=subject.roofline.memory_bytes,
        lower_bound_bytes=0,
        numbers=NOT_RUN,
        graph_digest=subject.digest,
        step_digest=hashlib.sha256(signatures.encode()).hexdigest()[:16],
        planner=code_digest()[:12] if case.has_limit else "",
        provenance=subject.provenance(graph),
        samples=samples_of(subject.traced),
        conformance=conformance or subject.conformance,
    )
