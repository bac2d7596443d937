"""In-place operators on memory of the step itself become functional ones, for the search to move and repeat.

    x = f(...); x.relu_(); use(x)   ->   x = f(...); y = relu(x); use(y)

Eager's in-place re-use is won back where a plan is realized: an operator whose input dies takes over its memory, which
happens wherever eager does it and in many other places. Weight updates stay in place, and so does all that writes
random numbers.
"""

from __future__ import annotations

from dataclasses import replace

from magis.analysis.windows import fills
from magis.aten.facts import FUNCTIONAL_FORM, may_change_place
from magis.ir import Graph, Op, Storage


def functionalize(graph: Graph) -> Graph:
    """The same step without in-place writes to temporary storages, where these can be told apart."""
    targets = {storage for storage in _written(graph) if _can_split(graph, storage)}
    if not targets:
        return graph
    storages = dict(graph.storages)
    values = dict(graph.values)
    ops = []
    current: dict[int, tuple[int, int]] = {storage: (storage, 0) for storage in targets}
    for op in graph.ops:
        new = replace(op, reads=_renamed(op.reads, current))
        hit = [storage for storage, _ in op.writes if storage in targets]
        if hit:
            (old,) = hit
            fresh = Storage(len(storages), graph.storages[old].nbytes, "temporary")
            storages[fresh.id] = fresh
            current[old] = (fresh.id, dict(op.writes)[old])
            new = replace(new, target=FUNCTIONAL_FORM[op.target], writes=())
        for value in new.made():
            owner = graph.values[value].storage
            if owner in targets:
                values[value] = replace(values[value], storage=current[owner][0])
        ops.append(new)
    return replace(graph, storages=storages, values=values, ops=tuple(ops))


def _renamed(versions: tuple[tuple[int, int], ...], current: dict[int, tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    renamed = []
    for storage, version in versions:
        owner, base = current.get(storage, (storage, 0))
        renamed.append((owner, version - base))
    return tuple(renamed)


def _written(graph: Graph) -> list[int]:
    found = {storage for op in graph.ops for storage, _ in op.writes if op.phase != "update"}
    return sorted(s for s in found if graph.storages[s].kind == "temporary")


def _can_split(graph: Graph, storage: int) -> bool:
    """Whether every write to the storage is a functionalizable one that covers it, read only through its result."""
    seen: set[int] = set()  # values that show the newest contents
    for op in graph.ops:
        touched = [value for value in op.inputs() if graph.values[value].storage == storage]
        if any(value not in seen for value in touched):
            return False
        made = [value for value in op.made() if graph.values[value].storage == storage]
        if any(s == storage for s, _ in op.writes):
            if not _covers(graph, op, storage, touched):
                return False
            seen = set(made)
        else:
            seen.update(made)
    return True


def _covers(graph: Graph, op: Op, storage: int, touched: list[int]) -> bool:
    if op.target not in FUNCTIONAL_FORM or op.random or len(touched) != 1 or len(op.writes) != 1:
        return False
    value = graph.values[touched[0]]
    if not may_change_place(FUNCTIONAL_FORM[op.target], op.args, op.kwargs, dtype=value.dtype):
        return False
    # A result of another data type than the written tensor's is no longer the same operator; masks do not widen it.
    masked = op.target.startswith("aten.masked_fill_")
    if not masked and any(graph.values[other].dtype != value.dtype for other in op.inputs()):
        return False
    return op.inputs()[0] == value.id and fills(value, graph.storages[storage])
