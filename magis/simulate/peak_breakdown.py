"""Bytes by module, kind and line: what a step holds at its peak, and what a plan changes there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from magis.graph import Graph, Op, Ref
from magis.graph.hazards import is_pure_view, lifetimes
from magis.graph.loop_rules import JOIN, REDUCE
from magis.results import ModuleBytes, Peak, collapsed
from magis.simulate.simulator import MemoryProfile, Workspace, replay, rounded

# Whose the memory of a step is: the module, kind and line of every storage at one moment.

KINDS = {"forward": "activation", "backward": "gradient", "update": "update"}
"""What a temporary tensor is called, by the phase of the operator that made it."""


@dataclass(frozen=True)
class Owner:
    """Where a storage comes from."""

    kind: str
    module: str
    line: str = ""


Owned = tuple[Owner, int]
"""Whose a storage in memory is, and its bytes as the allocator hands them out."""


def live(
    graph: Graph, at: int, workspace: Workspace, *, deaths: Mapping[int, int] | None = None, rounding: int = 1
) -> Iterator[Owned]:
    """Every storage that is in memory during operator ``at`` (-1: before the first), persistent ones included.

    During a loop there are those of its body at the worst moment of one part, too, as ``replay`` counts them.
    """
    known = owners(graph, at)
    lives = lifetimes(graph, deaths)
    for storage in graph.storages.values():
        here = storage.kind == "temporary" and lives.born.get(storage.id, at + 1) <= at <= lives.dies[storage.id]
        if storage.persistent or here:
            yield known.get(storage.id, Owner(storage.kind, "")), rounded(storage.nbytes, rounding)
    body = graph.ops[at].body if at >= 0 else None
    if body is not None:
        inner = replay(body.graph, workspace, rounding=rounding)
        worst = inner.tensors.index(inner.tensor_bytes) if inner.tensors else -1
        yield from live(body.graph, worst, workspace, rounding=rounding)


def owners(graph: Graph, at: int) -> dict[int, Owner]:
    """Storage -> owner, as it is during operator ``at``: memory that was taken over belongs to who took it.

    Persistent tensors belong to the module that they are named after.
    """
    return _walked(graph, at)[0]


def _walked(graph: Graph, at: int) -> tuple[dict[int, Owner], dict[int, Owner]]:
    """The owners; of a loop's body also: value of a whole -> owner of the parts that are put into it. Every body is
    walked once, however deep loops lie in each other."""
    found, wholes = named_owners(graph), dict[int, Owner]()
    for op in graph.ops[: at + 1]:
        note_owners(graph, op, found, wholes)
    return found, wholes


def named_owners(graph: Graph) -> dict[int, Owner]:
    """Persistent storage -> owner."""
    found: dict[int, Owner] = {}
    for value in graph.inputs:
        storage = graph.storages[graph.values[value].storage]
        if storage.persistent and storage.id not in found:
            found[storage.id] = _named(storage.kind, graph.values[value].name)
    return found


def note_owners(graph: Graph, op: Op, found: dict[int, Owner], wholes: dict[int, Owner]) -> None:
    """Write down whose memory is once the operator runs; ``found`` and ``wholes`` are as after the one before it."""
    merged: dict[int, Owner] = {}
    if op.body is not None:
        inner = op.body.graph
        of_body = _walked(inner, len(inner.ops))[1]
        pairs = zip((*op.inputs(), *op.made()), inner.inputs, strict=True)
        merged = {value: of_body[within] for value, within in pairs if within in of_body}
    for value, owner in _made(graph, op, found, merged):
        storage = graph.storages[graph.values[value].storage]
        if not storage.persistent:
            found[storage.id] = owner
    for value, owner in merged.items():
        wholes.setdefault(value, owner)
    match op.target, op.args:
        case "magis.join" | "magis.reduce", (Ref(into), Ref(part), *_):
            owner_of_part = found.get(graph.values[part].storage)
            if owner_of_part is not None:
                wholes.setdefault(into, owner_of_part)


def _named(kind: str, name: str) -> Owner:
    """``parameter:layers.0.weight``, ``state:exp_avg:layers.0.weight``; batches and constants belong to no module."""
    path = name.rpartition(":")[2] if kind in ("parameter", "buffer", "state") else ""
    return Owner(kind, path.rpartition(".")[0])


def _made(graph: Graph, op: Op, known: Mapping[int, Owner], merged: Mapping[int, Owner]) -> Iterator[tuple[int, Owner]]:
    """The values whose contents an operator makes, with their owner; ``merged`` has those that a loop puts together."""
    if op.body is not None:
        for value in op.made():
            yield value, merged.get(value) or _own(graph, op)
    elif op.target in ("magis.store", "magis.load"):  # on either side it is the same tensor
        (taken,) = op.inputs()
        owner = known.get(graph.values[taken].storage) or _own(graph, op)
        yield from ((value, owner) for value in op.made())
    elif not is_pure_view(graph, op):
        yield from ((value, _own(graph, op)) for value in op.made())


def _own(graph: Graph, op: Op) -> Owner:
    """The owner of what an operator makes; of one of ours, which stem from no module, that of its first reader."""
    if op.target.startswith("magis.") and not op.module and op.target not in (JOIN, REDUCE):
        made = set(op.made())
        reader = next((each for each in graph.ops if made & set(each.inputs()) and each.module), op)
        return Owner(KINDS.get(reader.phase, reader.phase), reader.module, reader.line)
    return Owner(KINDS.get(op.phase, op.phase), op.module, op.line)


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
    for owner, nbytes in owned:
        if nbytes:
            key = (owner.kind, owner.module)
            old = found.get(key, ModuleBytes(*key, 0, 0))
            line = owner.line if nbytes > largest.get(key, 0) else old.line
            largest[key] = max(largest.get(key, 0), nbytes)
            found[key] = ModuleBytes(*key, old.nbytes + nbytes, old.count + 1, line)
    return collapsed(found.values(), rows)


def changes(graph: Graph) -> tuple[ModuleBytes, ...]:
    """What a plan recomputes and swaps, in all parts of its loops, and what one part of a loop holds, by module."""
    return table(_changes(graph))


def repeats(graph: Graph) -> tuple[int, int]:
    """Calls that a plan runs again, and bytes that it moves to the host, in all parts of its loops."""
    found = list(_changes(graph))
    recomputed = sum(owner.kind == "recomputed" for owner, _ in found)
    return recomputed, sum(nbytes for owner, nbytes in found if owner.kind == "swapped")


def _changes(graph: Graph, times: int = 1) -> Iterator[Owned]:
    """One for every call, with the bytes that it makes or moves to the host; what runs again or moves, that often."""
    known = owners(graph, len(graph.ops))
    before: Counter[int] = Counter()
    for op in graph.ops:
        if op.body is not None:
            inner = op.body.graph
            for each in inner.ops:
                if not each.target.startswith("magis.") and not is_pure_view(inner, each):
                    yield Owner(f"in {op.body.parts} parts", each.module, each.line), _fresh_bytes(inner, each)
            yield from _changes(inner, times * op.body.parts)
        elif op.target == "magis.store":
            (value,) = op.inputs()
            storage = graph.storages[graph.values[value].storage]
            owner = known.get(storage.id, Owner("", ""))
            yield from [(Owner("swapped", owner.module, owner.line), storage.nbytes)] * times
        elif op.origin is not None and not is_pure_view(graph, op):
            before[op.origin] += 1
            if before[op.origin] > 1:
                yield from [(Owner("recomputed", op.module, op.line), _fresh_bytes(graph, op))] * times


def _fresh_bytes(graph: Graph, op: Op) -> int:
    """Bytes of the tensors that a call makes, whichever memory they get."""
    storages = {graph.values[value].storage for value in op.made()}
    return sum(graph.storages[storage].nbytes for storage in storages)
