"""Memory of a training step whose network, or network and loss, is compiled by inductor, predicted before it runs.

Forward, loss and backward run once on hollow tensors, through inductor's own generated code (`hollow_inductor.py`), and
a ledger follows every storage (`compiled_window.py`). The update is the captured step's, as eager runs it, on the
gradients that compiled code leaves. Scratch of torch's kernels, which generated code calls for products, convolutions
and attention, is known as in eager's prediction: measured kernel by kernel on a CPU, estimated on a simulated device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

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
from magis.runtime.measure import device_memory
from magis.runtime.scratch import Needs, measure_workspaces, needs
from magis.simulate.peak_breakdown import ROWS, peak_of
from magis.simulate.reserved_bytes import RELEASE, Event, replayed, simulated_allocator
from magis.simulate.simulator import replay, rounded

COMPILED = {
    "model": "network compiled",
    "loss": "network and loss compiled",
    "step": "network and loss compiled, and the update",
}
"""Parts of a step that can be compiled, in words: the network alone, network and loss as one function, and the update
as another one."""
STRATEGY = "compile"


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
    figures, note = compiled_figures(subject, what, case.allocator)
    said = "not checked: compiled, and predicted"
    found = other_result(replace(case, strategy=STRATEGY), subject, figures, figures, conformance=said)
    return replace(found, priced=False, note=note)


def compiled_figures(subject: Subject, what: str, allocator: str = "") -> tuple[StepFigures, str]:
    """Predict the memory of a compiled step: ``what`` is one of `COMPILED`, ``allocator`` are settings as in
    PYTORCH_ALLOC_CONF. The latency is eager's. Return the figures, and a note on graphs and limits. Raises MagisError
    for steps that cannot be captured or compiled."""
    if what not in COMPILED:
        raise UsageError(f"compiled={what!r}", hint=f"use {' or '.join(map(repr, COMPILED))}")
    if subject.traced.optimizer.accumulate > 1:
        raise UsageError("a compiled step of several micro-batches is not predicted", hint="leave out accumulate")
    if what == "step" and subject.traced.optimizer.kind == "apart":
        raise UsageError(
            f"{subject.traced.name}: its optimizer's code is not compiled here", hint="use compiled='loss'"
        )
    captured = subject.captured.original
    if any(op.target.startswith("magis_flex.") for op in captured.graph.ops):
        raise UsageError(
            f"{subject.traced.name}: flex_attention in a compiled step is not predicted", hint="leave out compiled"
        )
    first = next((at for at, op in enumerate(captured.graph.ops) if op.phase == "update"), len(captured.graph.ops))
    update = EagerUpdate(captured.graph, captured.deaths, first)
    cast, rounding = autocast_type(subject.source.dtype), subject.roofline.rounding
    window = compiled_window(subject.traced, what, cast, rounding, subject.kind, subject.device_model.capability)
    costs = subject.costs(_workspaces(subject, (*window.calls, *update.calls)))
    eager = replay(captured.graph, costs.workspace, deaths=captured.deaths, rounding=rounding)
    persistent, (above_tensors, above) = eager.persistent_bytes, (0, 0) if what == "step" else update.above(costs)
    tensors = persistent + max(window.tensor_bytes, window.kept_bytes + above_tensors)
    busy = [call.alive_bytes + costs.workspace(call.op, call.values) for call in window.calls]
    peak = max(tensors, persistent + max(busy, default=0), persistent + window.kept_bytes + above)
    events = _numbered(window.events, () if what == "step" else update.events())
    reserved = None if subject.kind == "cpu" else _reserved(subject, events, allocator)
    at_peak = peak_of(captured.graph, costs.workspace, eager, deaths=captured.deaths, rounding=rounding)
    figures = StepFigures(
        Memory(tensors, peak),
        subject.latency_ns(captured.graph) / 1e6,
        reserved_bytes=None if reserved is None else max(peak, reserved),
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


def _reserved(subject: Subject, events: Iterable[Event], settings: str) -> int:
    """Return the bytes that CUDA's caching allocator with settings reserves for the step, without scratch."""
    storages = subject.captured.original.graph.storages.values()
    made = simulated_allocator(settings, device_memory(subject.source.device))
    return replayed([each.nbytes for each in storages if each.persistent], events, made).reserved_bytes


def _numbered(*events: Iterable[tuple[int, int]]) -> Iterator[Event]:
    """Yield allocations and frees of consecutive parts of a step, each allocation with a number of its own; what is
    left is freed at the end, and a storage that is resized before its new allocation."""
    names: dict[tuple[int, int], int] = {}
    numbers = count()
    for part, found in enumerate(events):
        for storage, nbytes in found:
            if (part, storage) in names:
                yield names.pop((part, storage)), RELEASE
            if nbytes >= 0:
                names[part, storage] = next(numbers)
                yield names[part, storage], nbytes
    yield from ((name, RELEASE) for name in names.values())


def _note(window: CompiledWindow, what: str, kind: str) -> str:
    """Return what was compiled, where graphs break, and what is not known."""
    many = "1 graph" if window.graphs == 1 else f"{window.graphs} graphs"
    said = [f"{COMPILED[what]}, in {many}" if window.graphs else "nothing is compiled: eager"]
    if window.breaks:
        said.append(f"graph breaks: {', '.join(window.breaks)}")
    if kind != "cpu":
        said.append("fused by Triton's rules, without the choices that inductor makes by the GPU itself")
    return "; ".join(said)
