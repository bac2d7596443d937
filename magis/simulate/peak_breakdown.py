"""Bytes by module, kind and line: those in memory at a step's peak, and those that a plan changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from magis.graph import PERSISTENT_KINDS, Graph, Op, Ref, Storage
from magis.graph.hazards import Lifetimes, is_pure_view, lifetimes
from magis.graph.loop_rules import MERGES
from magis.results import ModuleBytes, Peak, collapsed
from magis.simulate.simulator import MemoryProfile, Workspace, replay, rounded

# Owners of a step's memory: module, kind and line of every storage at one operator.

KINDS = {"forward": "activation", "backward": "gradient", "update": "update"}
"""Kind of a temporary tensor, by the phase of the operator that makes it."""


@dataclass(frozen=True)
class Owner:
    """Origin of a storage: kind, module and source line."""

    kind: str
    module: str
    line: str = ""


Owned = tuple[Owner, int]
"""Owner of a storage, and the storage's bytes as rounded by the allocator."""


def live_storages(
    graph: Graph, at: int, workspace: Workspace, *, deaths: Mapping[int, int] | None = None, rounding: int = 1
) -> Iterator[Owned]:
    """Yield every storage in memory during operator ``at`` (-1: before the first), persistent ones included.

    For a loop, storages of its body at the peak of one part are included, as in ``replay``.
    """
    known = owners(graph, at)
    for storage in alive(graph, at, lifetimes(graph, deaths)):
        yield known.get(storage.id, Owner(storage.kind, "")), rounded(storage.nbytes, rounding)
    body = graph.ops[at].body if at >= 0 else None
    if body is not None:
        inner = replay(body.graph, workspace, rounding=rounding)
        worst = inner.tensors.index(inner.tensor_bytes) if inner.tensors else -1
        yield from live_storages(body.graph, worst, workspace, rounding=rounding)


def alive(graph: Graph, at: int, lives: Lifetimes) -> Iterator[Storage]:
    """Yield the storages in memory during operator ``at``, persistent ones included."""
    for storage in graph.storages.values():
        here = storage.kind == "temporary" and lives.born.get(storage.id, at + 1) <= at <= lives.dies[storage.id]
        if storage.persistent or here:
            yield storage


def owners(graph: Graph, at: int) -> dict[int, Owner]:
    """Return the owner of each storage during operator ``at``: memory reused in place belongs to the new tensor.

    Persistent tensors belong to the module in their name.
    """
    return _find_owners(graph, at)[0]


def _find_owners(graph: Graph, at: int) -> tuple[dict[int, Owner], dict[int, Owner]]:
    """Return owners by storage; for a loop body also value joined from parts -> owner of these parts. Each body is
    walked once, however deep loops are nested."""
    found, wholes = named_owners(graph), dict[int, Owner]()
    for op in graph.ops[: at + 1]:
        note_owners(graph, op, found, wholes)
    return found, wholes


def named_owners(graph: Graph) -> dict[int, Owner]:
    """Return the owners of persistent storages; batches and constants belong to no module."""
    found: dict[int, Owner] = {}
    for value in graph.inputs:
        storage = graph.storages[graph.values[value].storage]
        kind = "state" if storage.kind == "host" else storage.kind  # moved
        if kind in PERSISTENT_KINDS and storage.id not in found:
            # "parameter:layers.0.weight", "state:exp_avg:layers.0.weight"
            name = graph.values[value].name if kind in ("parameter", "buffer", "state") else ""
            found[storage.id] = Owner(kind, name.rpartition(":")[2].rpartition(".")[0])
    return found


def note_owners(graph: Graph, op: Op, found: dict[int, Owner], wholes: dict[int, Owner]) -> None:
    """Update the owners for one operator; ``found`` and ``wholes`` are those after the operator before."""
    merged: dict[int, Owner] = {}
    if op.body is not None:
        inner = op.body.graph
        of_body = _find_owners(inner, len(inner.ops))[1]
        pairs = zip((*op.inputs(), *op.made()), inner.inputs, strict=True)
        merged = {value: of_body[within] for value, within in pairs if within in of_body}
    for value, owner in _outputs_with_owners(graph, op, found, merged):
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
        case (("magis.addmm" | "magis.addsum"), (Ref(into), *_)):
            wholes.setdefault(into, _owner_of_outputs(graph, op))


def _outputs_with_owners(
    graph: Graph, op: Op, known: Mapping[int, Owner], merged: Mapping[int, Owner]
) -> Iterator[tuple[int, Owner]]:
    """Yield the outputs of an operator with their owners; ``merged`` has those of tensors that a loop joins."""
    if op.body is not None:
        for value in op.made():
            yield value, merged.get(value) or _owner_of_outputs(graph, op)
    elif op.target in ("magis.store", "magis.load"):  # a host copy has the owner of its source
        taken = op.inputs()[0]
        owner = known.get(graph.values[taken].storage) or _owner_of_outputs(graph, op)
        yield from ((value, owner) for value in op.made())
    elif not is_pure_view(graph.values, op):
        yield from ((value, _owner_of_outputs(graph, op)) for value in op.made())


def _owner_of_outputs(graph: Graph, op: Op) -> Owner:
    """Return the owner of an operator's outputs; a ``magis.`` operator without a module has its first reader's."""
    if op.target.startswith("magis.") and not op.module and op.target not in MERGES:
        made = set(op.made())
        reader = next((each for each in graph.ops if made & set(each.inputs()) and each.module), op)
        return Owner(KINDS.get(reader.phase, reader.phase), reader.module, reader.line)
    return Owner(KINDS.get(op.phase, op.phase), op.module, op.line)


class Tenancy(NamedTuple):
    """A tensor on a storage, and the first and the last operator during which it is in memory."""

    storage: int
    owner: Owner
    value: int
    """First value of the graph on it."""
    born: int
    """Position of the operator that makes it; -1: it exists before the step."""
    dies: int


def tenancies(graph: Graph, deaths: Mapping[int, int] | None = None) -> Iterator[Tenancy]:
    """Yield the tensors of a step, persistent ones first, without those in bodies of loops. Memory that is reused in
    place is a new tensor where its kind or module changes."""
    lives, end = lifetimes(graph, deaths), len(graph.ops)
    found, wholes = named_owners(graph), dict[int, Owner]()
    first = {graph.values[value].storage: value for value in reversed(graph.values)}
    for storage in graph.storages.values():
        if storage.persistent:
            owner = found.get(storage.id, Owner(storage.kind, ""))
            yield Tenancy(storage.id, owner, first[storage.id], -1, end)
    held: dict[int, Tenancy] = {}
    for position, op in enumerate(graph.ops):
        note_owners(graph, op, found, wholes)
        for value in (*op.made(), *op.inputs()):
            at = graph.values[value].storage
            if graph.storages[at].kind != "temporary" or position > lives.dies[at]:
                continue
            owner, before = found.get(at, Owner("activation", op.module, op.line)), held.get(at)
            if before is None or (before.owner.kind, before.owner.module) != (owner.kind, owner.module):
                if before is not None:
                    yield before._replace(dies=position - 1)
                held[at] = Tenancy(at, owner, value, position, lives.dies[at])
    yield from held.values()


ROWS = 256
"""Most rows of a table."""


def peak_of(
    graph: Graph,
    workspace: Workspace,
    profile: MemoryProfile,
    *,
    deaths: Mapping[int, int] | None = None,
    rounding: int = 1,
) -> Peak:
    """Break down the peak of a step; ``profile`` is the result of ``replay`` with equal arguments."""
    at = profile.tensors.index(profile.tensor_bytes) if profile.tensors else -1
    held = module_table(live_storages(graph, at, workspace, deaths=deaths, rounding=rounding))
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
    """Return the operator at a position; of a loop, the one at the peak of tensors (of all bytes with ``scratch``)."""
    op = graph.ops[at]
    while op.body is not None and op.body.graph.ops:
        inner = replay(op.body.graph, workspace, rounding=rounding)
        place = inner.peak_position if scratch else inner.tensors.index(inner.tensor_bytes)
        op = op.body.graph.ops[place]
    return op


def module_table(owned: Iterable[Owned], rows: int = ROWS) -> tuple[ModuleBytes, ...]:
    """Return bytes by kind and module, largest first; each byte is in exactly one row."""
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
    """Return by module the bytes that a plan recomputes and swaps in all parts of loops, and those made by one part."""
    return module_table(_changes(graph))


def repeats(graph: Graph) -> tuple[int, int]:
    """Return the number of recomputed calls, and the bytes swapped to the host, over all parts of loops."""
    found = list(_changes(graph))
    recomputed = sum(owner.kind == "recomputed" for owner, _ in found)
    return recomputed, sum(nbytes for owner, nbytes in found if owner.kind == "swapped")


def _changes(graph: Graph, times: int = 1) -> Iterator[Owned]:
    """Yield an entry for each operator in a loop, recomputation and swap, with the bytes that it makes or moves."""
    known = owners(graph, len(graph.ops))
    before: Counter[int] = Counter()
    for op in graph.ops:
        if op.body is not None:
            inner = op.body.graph
            for each in inner.ops:
                if not each.target.startswith("magis.") and not is_pure_view(inner.values, each):
                    yield Owner(f"in {op.body.parts} parts", each.module, each.line), _fresh_bytes(inner, each)
            yield from _changes(inner, times * op.body.parts)
        elif op.target == "magis.store":
            value = op.inputs()[0]
            storage = graph.storages[graph.values[value].storage]
            owner = known.get(storage.id, Owner("", ""))
            yield from [(Owner("swapped", owner.module, owner.line), storage.nbytes)] * times
        elif op.origin is not None and not is_pure_view(graph.values, op):
            before[op.origin] += 1
            if before[op.origin] > 1:
                yield from [(Owner("recomputed", op.module, op.line), _fresh_bytes(graph, op))] * times


def _fresh_bytes(graph: Graph, op: Op) -> int:
    """Return the bytes of the storages that a call's outputs are on."""
    storages = {graph.values[value].storage for value in op.made()}
    return sum(graph.storages[storage].nbytes for storage in storages)
