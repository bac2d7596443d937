"""In place, by parts: which results of a region may lie on the memory of which tensors that it takes.

    for each part:  p = magis.part(x, 0);  q = f(p);  magis.join(y, q, 0)        y lies on the memory of x

A stretch of x that has been read for the last time is no longer needed: the part's result may be written there. Whole
operators can do that only where they run element by element; in parts any operator can whose result looks like what it
takes. The published method allocates every output of a region beside its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from magis.analysis.windows import fills
from magis.aten.splits import Cut
from magis.fission.region import Leaving, Region
from magis.ir import Graph


def takeovers(graph: Graph, region: Region, left: Sequence[Leaving]) -> dict[int, int]:
    """Storage of a tensor that leaves the region -> storage of the tensor whose memory it takes over."""
    found: dict[int, int] = {}
    victims = dict(_victims(graph, region))
    written = {storage for p in region.cuts for storage, _ in graph.ops[p].writes}
    written |= {graph.values[value].storage for value in graph.outputs}
    for leaving in left:
        ours = graph.values[leaving.value]
        if ours.storage in written:
            continue
        for storage, (value, dim) in victims.items():
            theirs = graph.values[value]
            same = (theirs.shape, theirs.stride, theirs.dtype) == (ours.shape, ours.stride, ours.dtype)
            if dim == leaving.how and same and storage not in found.values():
                found[ours.storage] = storage
                break
    return found


def _victims(graph: Graph, region: Region) -> Iterator[tuple[int, tuple[int, int]]]:
    """Storages that nobody touches once the region has begun but its own operators, by one tensor cut in one way."""
    touching: dict[int, list[int]] = {}
    for position, op in enumerate(graph.ops):
        for value in (*op.inputs(), *op.made()):
            touching.setdefault(graph.values[value].storage, []).append(position)
    first = min(region.cuts)
    kept = {graph.values[value].storage for value in graph.outputs}
    kept |= {storage for p in region.cuts for storage, _ in graph.ops[p].writes}
    for storage, taken in _taken(graph, region).items():
        (value, dim), *others = sorted(taken, key=str)
        last = max((position for position in touching[storage] if position not in region.cuts), default=first)
        if others or not isinstance(dim, int) or last >= first or storage in kept:
            continue  # what other parts read, too, may not be overwritten
        if graph.storages[storage].kind == "temporary" and fills(graph.values[value], graph.storages[storage]):
            yield storage, (value, dim)


def _taken(graph: Graph, region: Region) -> Mapping[int, set[tuple[int, Cut]]]:
    """How the region's operators take storages from outside: values with the dimension that is cut."""
    made = {value for position in region.cuts for value in graph.ops[position].made()}
    found: dict[int, set[tuple[int, Cut]]] = {}
    for position, split in region.cuts.items():
        for value, dim in zip(graph.ops[position].inputs(), split.inputs, strict=True):
            if value not in made:
                found.setdefault(graph.values[value].storage, set()).add((value, dim))
    return found


def last_readers(graph: Graph, region: Region) -> dict[int, int]:
    """Storage -> position of the last of the region's operators that takes a tensor on it."""
    found: dict[int, int] = {}
    for position in sorted(region.cuts):
        found |= dict.fromkeys((graph.values[value].storage for value in graph.ops[position].inputs()), position)
    return found
