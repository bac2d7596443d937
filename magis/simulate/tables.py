"""Short tables of bytes by module: what a step holds at its peak, and what a plan does to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from magis.analysis.hazards import is_pure_view
from magis.ir import Graph, Op
from magis.results import ModuleBytes, Peak, collapsed
from magis.simulate.owners import Owned, Owner, live, owners
from magis.simulate.replay import MemoryProfile, Workspace, replay

__all__ = ["ROWS", "changes", "peak_of", "table"]

ROWS = 256
"""The most rows of a table."""


def peak_of(
    graph: Graph,
    workspace: Workspace,
    profile: MemoryProfile,
    *,
    deaths: Mapping[int, int] | None = None,
    rounding: int = 1,
) -> Peak:
    """What makes the peak of a step; ``profile`` is what ``replay`` says of it with the same arguments."""
    at = profile.tensors.index(profile.tensor_bytes) if profile.tensors else -1
    held = table(live(graph, at, workspace, deaths=deaths, rounding=rounding))
    if at < 0:
        return Peak("", "", "", "", held)
    op = _innermost(graph, at, workspace, rounding, scratch=False)
    worst = profile.peak_position
    beside = max(0, profile.peaks[worst] - profile.tensors[worst])
    busy = _innermost(graph, worst, workspace, rounding, scratch=True)
    return Peak(
        op=op.target,
        module=op.module,
        phase=op.phase,
        line=op.line,
        held=held,
        scratch_bytes=beside,
        scratch_op=busy.target if beside else "",
        scratch_module=busy.module if beside else "",
    )


def _innermost(graph: Graph, at: int, workspace: Workspace, rounding: int, *, scratch: bool) -> Op:
    """The operator at a position, of a loop the one at its worst moment: of all bytes with ``scratch``, of tensors."""
    op = graph.ops[at]
    while op.body is not None and op.body.graph.ops:
        inner = replay(op.body.graph, workspace, rounding=rounding)
        place = inner.peak_position if scratch else inner.tensors.index(inner.tensor_bytes)
        op = op.body.graph.ops[place]
    return op


def table(owned: Iterable[Owned], rows: int = ROWS) -> tuple[ModuleBytes, ...]:
    """Bytes by kind and module, most first; every byte is in exactly one row."""
    found: dict[tuple[str, str], ModuleBytes] = {}
    largest: dict[tuple[str, str], int] = {}
    for each in owned:
        if each.nbytes:
            key = (each.owner.kind, each.owner.module)
            old = found.get(key, ModuleBytes(*key, 0, 0))
            line = each.owner.line if each.nbytes > largest.get(key, 0) else old.line
            largest[key] = max(largest.get(key, 0), each.nbytes)
            found[key] = ModuleBytes(*key, old.nbytes + each.nbytes, old.count + 1, line)
    return collapsed(found.values(), rows)


def changes(graph: Graph) -> tuple[ModuleBytes, ...]:
    """What a plan recomputes, swaps and runs in parts, by module."""
    return table(_changes(graph, owners(graph, len(graph.ops))))


def _changes(graph: Graph, known: Mapping[int, Owner]) -> Iterator[Owned]:
    """One for every call; the bytes that it makes, or moves to the host."""
    before: Counter[int] = Counter()
    for op in graph.ops:
        if op.body is not None:
            inner = op.body.graph
            for each in inner.ops:
                if not each.target.startswith("magis.") and not is_pure_view(inner, each):
                    yield Owned(Owner(f"in {op.body.parts} parts", each.module, each.line), _fresh_bytes(inner, each))
            yield from _changes(inner, owners(inner, len(inner.ops)))
        elif op.target == "magis.store":
            (value,) = op.inputs()
            storage = graph.storages[graph.values[value].storage]
            owner = known.get(storage.id, Owner("", ""))
            yield Owned(Owner("swapped", owner.module, owner.line), storage.nbytes)
        elif op.origin is not None and not is_pure_view(graph, op):
            before[op.origin] += 1
            if before[op.origin] > 1:
                yield Owned(Owner("recomputed", op.module, op.line), _fresh_bytes(graph, op))


def _fresh_bytes(graph: Graph, op: Op) -> int:
    """Bytes of the tensors that a call makes, whichever memory they get."""
    storages = {graph.values[value].storage for value in op.made()}
    return sum(graph.storages[storage].nbytes for storage in storages)
