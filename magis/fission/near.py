"""Regions around one operator: what could run in parts so that less is in memory while that operator runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import rustworkx as rx

from magis.analysis.hazards import dependency_graph
from magis.aten.splits import Split, splits
from magis.fission.grow import grow
from magis.ir import Graph

REACH = 8
"""Operators ahead of the one in question, weight updates not counted, at which a region may begin."""
LENGTHS = (0, 2, 5, 12)
"""Operators behind it at which a region may end."""
SMALL = 16
"""Tensors below this share of the largest one near are not worth a cut of their own."""


def regions_around(graph: Graph, position: int, *, most: int) -> list[dict[int, Split]]:
    """At most ``most`` sets of operators, the one at ``position`` among them, that can be cut together; those first
    which hold most bytes that nobody outside needs. Whether they are legal regions is not looked at."""
    dag = dependency_graph(graph)
    found: dict[tuple[tuple[int, Split], ...], int] = {}
    ahead = [p for p in range(position) if graph.ops[p].phase != "update"][-REACH:]
    behind = [p for p in range(position, len(graph.ops)) if graph.ops[p].phase != "update"]
    for start, first in _starts(graph, [*ahead, position]):
        for length in LENGTHS:
            end = behind[min(length, len(behind) - 1)] + 1
            cuts = _piece(dag, grow(graph, start, range(first, end), dag), position)
            if cuts:
                found.setdefault(tuple(sorted(cuts.items())), inner_bytes(graph, cuts))
    for split in splits(graph.ops[position], graph.values):
        cuts = {position: split}
        found.setdefault(tuple(cuts.items()), inner_bytes(graph, cuts))
    ranked = sorted(found, key=lambda key: (-found[key], len(key)))
    return [dict(key) for key in _varied(ranked, found, most)]


def _varied(
    ranked: list[tuple[tuple[int, Split], ...]], weight: Mapping[tuple[tuple[int, Split], ...], int], most: int
) -> list[tuple[tuple[int, Split], ...]]:
    """The smallest region of every weight, in order."""
    smallest: dict[int, tuple[tuple[int, Split], ...]] = {}
    for key in ranked:
        smallest.setdefault(weight[key], key)
    chosen = list(smallest.values())[: most - 1]
    chosen += [key for key in ranked if key not in chosen]
    return chosen[:most]


def _starts(graph: Graph, near: Sequence[int]) -> Iterator[tuple[dict[int, int], int]]:
    """Cut tensors from which a region may grow, with the first operator that it may hold."""
    sizes = [_weight(graph, value) for at in near for value in graph.ops[at].inputs()]
    largest = max(sizes, default=0)
    seen: set[tuple[int, int, int]] = set()
    for at in near:
        for value in graph.ops[at].inputs():
            if _weight(graph, value) * SMALL < largest:
                continue
            for dim, size in enumerate(graph.values[value].shape):
                if size > 1 and (value, dim, at) not in seen:
                    seen.add((value, dim, at))
                    yield {value: dim}, at


def _weight(graph: Graph, value: int) -> int:
    storage = graph.storages[graph.values[value].storage]
    return 0 if storage.persistent else storage.nbytes


def _piece(dag: rx.PyDiGraph[int, None], cuts: Mapping[int, Split], position: int) -> dict[int, Split]:
    """The operators that hang together with the one at ``position``."""
    if position not in cuts:
        return {}
    sub = dag.subgraph(sorted(cuts))
    for piece in rx.weakly_connected_components(sub):
        inside = {sub[node] for node in piece}
        if position in inside:
            return {p: cuts[p] for p in sorted(inside)}
    return {}


def inner_bytes(graph: Graph, cuts: Mapping[int, Split]) -> int:
    """Bytes of storages that the operators make and nobody else uses."""
    made = {graph.values[value].storage for p in cuts for value in graph.ops[p].made()}
    used = {graph.values[v].storage for p, op in enumerate(graph.ops) if p not in cuts for v in op.inputs()}
    used |= {graph.values[value].storage for value in graph.outputs}
    taken = {graph.values[v].storage for p in cuts for v in graph.ops[p].inputs()}
    storages = graph.storages
    return sum(storages[s].nbytes for s in made - used if s in taken and storages[s].kind == "temporary")
