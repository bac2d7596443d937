"""Every tensor of a simulated step, with its birth and its death, and every call that runs meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from magis.cost.machines import Times
from magis.graph import Graph, Op
from magis.graph.hazards import is_pure_view
from magis.simulate.peak_breakdown import tenancies
from magis.simulate.simulator import MemoryProfile, Workspace, bytes_inside, replay, rounded
from magis.simulate.timeline import MOST_CALLS, UNTIMED, moments
from magis.step_records import TensorLives


def tensor_lives(
    graph: Graph,
    times: Times,
    workspace: Workspace,
    profile: MemoryProfile,
    *,
    deaths: Mapping[int, int] | None = None,
    rounding: int = 1,
    start: int = 0,
    kinds: Mapping[int, str] | None = None,
) -> TensorLives:
    """List the calls and tensors of a schedule; ``profile`` is the result of ``replay`` with equal arguments. During
    each call, the bytes of the tensors in memory and its scratch sum to those that ``replay`` counts.

    A loop is its calls, part by part, or one call with all its bytes as scratch in a step of more than MOST_CALLS.
    Calls before the operator at position ``start`` are left out. ``kinds`` are those of storages that do not follow
    from the phase.
    """
    columns = _Columns(workspace, rounding, _ops_that_run(graph) <= MOST_CALLS)
    columns.take(graph, profile, deaths, moments(graph, times), kinds or {}, start)
    return columns.lives()


def _ops_that_run(graph: Graph) -> int:
    """Return the number of operators, those of loops counted in every part."""
    return sum(1 if op.body is None else op.body.parts * _ops_that_run(op.body.graph) for op in graph.ops)


@dataclass(eq=False)
class _Columns:
    workspace: Workspace
    rounding: int
    apart: bool
    words: dict[str, int] = field(default_factory=dict)
    calls: dict[tuple[int, ...], int] = field(default_factory=dict)
    run: list[tuple[int, int, int]] = field(default_factory=list)
    """Call, end in ns and scratch of each call that runs."""
    tensors: list[tuple[int, ...]] = field(default_factory=list)
    """Rows of the fields of `TensorLives` from ``born`` on."""

    def take(
        self,
        graph: Graph,
        profile: MemoryProfile,
        deaths: Mapping[int, int] | None,
        ends: Iterator[int],
        kinds: Mapping[int, str],
        start: int = 0,
    ) -> None:
        """Add the calls and tensors of a graph, or of one part of a loop, whose operators end at ``ends``."""
        begins, last, seen, before = [], [], set[int](), 0
        for position, (op, tensors, peak) in enumerate(zip(graph.ops, profile.tensors, profile.peaks, strict=True)):
            begins.append(len(self.run))
            if position < start:  # of an earlier call of a step function, which has no loops
                before = next(ends)
                last.append(-1)
                continue
            again = op.origin is not None and op.origin in seen
            seen.add(-1 if op.origin is None else op.origin)
            if op.body is None:
                end = next(ends)
                if op.target not in UNTIMED and not is_pure_view(graph.values, op):
                    self.run.append((self._call(op, again=again), end - before, peak - tensors))
            elif self.apart:
                inner = replay(op.body.graph, self.workspace, rounding=self.rounding)
                for _ in range(op.body.parts):
                    self.take(op.body.graph, inner, None, ends, {})
            else:
                *_, end = islice(ends, op.body.parts * _ops_that_run(op.body.graph))
                inside = bytes_inside(op, graph, self.workspace, self.rounding)[0]
                self.run.append((self._call(op, again=again), end, peak - tensors + inside))
            last.append(len(self.run) - 1)
        for each in tenancies(graph, deaths):
            value, made = graph.values[each.value], each.born >= 0
            label = graph.ops[each.born].target if made else value.name.partition(":")[2] or value.name
            kind = kinds.get(each.storage, each.owner.kind)
            words = kind, each.owner.module, label, each.owner.line, f"{value.dtype}{list(value.shape)}"
            nbytes = rounded(graph.storages[each.storage].nbytes, self.rounding)
            life = begins[max(each.born, 0)], last[min(each.dies, len(last) - 1)]
            if nbytes and life[1] >= 0:
                self.tensors.append((*life, nbytes, *map(self._word, words)))

    def lives(self) -> TensorLives:
        run, tensors = zip(*self.run, strict=True), zip(*self.tensors, strict=True)
        return TensorLives(tuple(self.words), tuple(self.calls), *run, *tensors)

    def _word(self, text: str) -> int:
        return self.words.setdefault(text, len(self.words))

    def _call(self, op: Op, *, again: bool) -> int:
        op_words = (self._word(each) for each in (op.target, op.module, op.phase, op.line))
        return self.calls.setdefault((*op_words, int(again)), len(self.calls))
