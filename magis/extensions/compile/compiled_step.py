"""Memory of a training step whose network, or network and loss, is compiled by inductor, predicted before it runs.

Forward, loss and backward run once on hollow tensors, through inductor's own generated code (`hollow_inductor.py`), and
a ledger follows every storage (`compiled_window.py`). The update is the captured step's, as eager runs it, on the
gradients that compiled code leaves. Scratch of torch's kernels, which generated code calls for products, convolutions
and attention, is known as in eager's prediction: measured kernel by kernel on a CPU, estimated on a simulated device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from magis.cases.case_rows import other_result
from magis.cost.cost_model import RooflineCosts
from magis.dtypes import autocast_type
from magis.errors import UsageError
from magis.extensions.compile.compiled_window import Call, CompiledWindow, compiled_window
from magis.graph import Graph
from magis.graph.hazards import lifetimes
from magis.graph.nodes import PERSISTENT_KINDS
from magis.planner.subject import Subject
from magis.results import Case, CaseResult, Memory, ModuleBytes, Peak, StepFigures, collapsed
from magis.runtime.scratch import Needs, measure_workspaces, needs
from magis.simulate.cuda_caching_allocator import CachingAllocator
from magis.simulate.peak_breakdown import ROWS, peak_of
from magis.simulate.simulator import replay, rounded

COMPILED = {
    "model": "network compiled",
    "loss": "network and loss compiled",
    "step": "network and loss compiled, and the update",
}
"""Parts of a step that can be compiled, in words: the network alone, network and loss as one function, and the update
as another one."""
STRATEGY = "compile"
STEPS = 2
"""Steps after which the caching allocator's segments are counted."""


@dataclass(frozen=True)
class EagerUpdate:
    """The update of a captured step, which begins at operator ``first``."""

    graph: Graph
    deaths: Mapping[int, int]
    first: int

    @property
    def calls(self) -> tuple[Call, ...]:
        """Calls of the update."""
        return tuple(Call(op, self.graph.values, 0) for op in self.graph.ops[self.first :])

    def above(self, costs: RooflineCosts) -> tuple[int, int]:
        """Return the most bytes above what is alive when the update begins: of tensors, and of tensors and scratch."""
        profile = replay(self.graph, costs.workspace, deaths=self.deaths, rounding=costs.rounding)
        lives = lifetimes(self.graph, self.deaths)
        older = [storage for storage, born in lives.born.items() if born < self.first <= lives.dies[storage]]
        alive = sum(rounded(self.graph.storages[storage].nbytes, costs.rounding) for storage in older)
        start = profile.persistent_bytes + alive
        found = (max(levels[self.first :], default=start) - start for levels in (profile.tensors, profile.peaks))
        tensors, peak = (max(0, each) for each in found)
        return tensors, peak

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield allocations of the update, as storage and bytes, and its frees (-1 bytes)."""
        lives = lifetimes(self.graph, self.deaths)
        for position in range(self.first, len(self.graph.ops)):
            made = {self.graph.values[value].storage for value in self.graph.ops[position].made()}
            yield from ((each, self.graph.storages[each].nbytes) for each in made if lives.born.get(each) == position)
            yield from (
                (each, -1) for each, at in lives.dies.items() if at == position and lives.born[each] >= self.first
            )


def compiled_result(case: Case, subject: Subject, what: str) -> CaseResult:
    """Predict a case whose step is compiled, with the figures of `compiled_figures`."""
    figures, note = compiled_figures(subject, what)
    said = "not checked: compiled, and predicted"
    found = other_result(replace(case, strategy=STRATEGY), subject, figures, figures, conformance=said)
    return replace(found, priced=False, note=note)


def compiled_figures(subject: Subject, what: str) -> tuple[StepFigures, str]:
    """Predict the memory of a compiled step: ``what`` is one of `COMPILED`. The latency is eager's. Return the figures,
    and a note on graphs and limits. Raises MagisError for steps that cannot be captured or compiled."""
    if what not in COMPILED:
        raise UsageError(f"compiled={what!r}", hint=f"use {' or '.join(map(repr, COMPILED))}")
    if what == "step" and subject.traced.optimizer.kind == "apart":
        raise UsageError(
            f"{subject.traced.name}: its optimizer's code is not compiled here", hint="use compiled='loss'"
        )
    captured = subject.captured.original
    first = next((at for at, op in enumerate(captured.graph.ops) if op.phase == "update"), len(captured.graph.ops))
    update = EagerUpdate(captured.graph, captured.deaths, first)
    cast, rounding = autocast_type(subject.source.dtype), subject.roofline.rounding
    window = compiled_window(subject.traced, what, cast, rounding, subject.kind)
    costs = subject.costs(_workspaces(subject, (*window.calls, *update.calls)))
    eager = replay(captured.graph, costs.workspace, deaths=captured.deaths, rounding=rounding)
    persistent, (above_tensors, above) = eager.persistent_bytes, (0, 0) if what == "step" else update.above(costs)
    tensors = persistent + max(window.tensor_bytes, window.kept_bytes + above_tensors)
    busy = [call.alive_bytes + costs.workspace(call.op, call.values) for call in window.calls]
    peak = max(tensors, persistent + max(busy, default=0), persistent + window.kept_bytes + above)
    at_peak = peak_of(captured.graph, costs.workspace, eager, deaths=captured.deaths, rounding=rounding)
    figures = StepFigures(
        Memory(tensors, peak),
        subject.latency_ns(captured.graph) / 1e6,
        reserved_bytes=None
        if subject.kind == "cpu"
        else max(peak, _reserved(update, window, eager_update=what != "step")),
        at_peak=_at_peak(at_peak, window, above_tensors),
    )
    return figures, _note(window, what, subject.kind)


def _workspaces(subject: Subject, calls: Sequence[Call]) -> Mapping[str, int]:
    """Return the scratch of kernels by signature, measured on this CPU; nothing for other devices. Kernels that need
    another kernel's packed bytes (an LSTM's) are measured in a run of the eager step, which has them, too."""
    if subject.kind != "cpu" or not subject.may_run:
        return {}
    found = measure_workspaces(((call.op, call.values) for call in calls), subject.free_bytes)
    if any(needs(call.op, call.values) is Needs.BYTES for call in calls):
        found = {**subject.workspaces(subject.captured.original.graph), **found}
    return found


def _at_peak(eager: Peak, window: CompiledWindow, update: int) -> Peak:
    """Return what is alive at the peak: what stays by module, as at eager's peak, and the rest by kind."""
    stays = [row for row in eager.held if row.kind in PERSISTENT_KINDS]
    in_update = window.kept_bytes + update > window.tensor_bytes
    held = (("gradient", window.kept_bytes), ("update", update)) if in_update else window.held
    kinds = dict.fromkeys(kind for kind, _ in held)
    sizes = {kind: [nbytes for each, nbytes in held if each == kind and nbytes] for kind in kinds}
    rest = [ModuleBytes(kind, "", sum(found), len(found)) for kind, found in sizes.items() if found]
    phase = "update" if in_update else window.phase
    return Peak(eager.op if in_update else window.where, "", phase, "", collapsed((*stays, *rest), ROWS))


def _reserved(update: EagerUpdate, window: CompiledWindow, *, eager_update: bool) -> int:
    """Return the bytes that CUDA's caching allocator reserves for the step, without scratch."""
    allocator, numbers = CachingAllocator(), count()
    for storage in update.graph.storages.values():
        if storage.persistent:
            allocator.allocate(next(numbers), storage.nbytes)
    for _ in range(STEPS):
        names: dict[tuple[str, int], int] = {}
        of_window = ((("window", each), nbytes) for each, nbytes in window.events)
        of_update = ((("update", each), nbytes) for each, nbytes in (update.events() if eager_update else ()))
        for key, nbytes in chain(of_window, of_update):
            if nbytes < 0:
                allocator.release(names.pop(key, -1))
            else:
                allocator.release(names.pop(key, -1))  # a storage that is resized
                names[key] = next(numbers)
                allocator.allocate(names[key], nbytes)
        for name in names.values():
            allocator.release(name)
    return allocator.reserved


def _note(window: CompiledWindow, what: str, kind: str) -> str:
    """Return what was compiled, where graphs break, and what is not known."""
    many = "1 graph" if window.graphs == 1 else f"{window.graphs} graphs"
    said = [f"{COMPILED[what]}, in {many}" if window.graphs else "nothing is compiled: eager"]
    if window.breaks:
        said.append(f"graph breaks: {', '.join(window.breaks)}")
    if kind != "cpu":
        said.append("fused by Triton's rules, without the choices that inductor makes by the GPU itself")
    return "; ".join(said)
