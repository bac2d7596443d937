"""Where a step may be cut into parts: one piece for every place of the forward pass, those that hold most first.

What a cut reaches from some place on falls into pieces where operators between them cannot be cut (dropout, say). Of
these the one counts whose own tensors, which nothing outside of it touches, take most bytes at once: a loop makes
nothing else smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import rustworkx as rx

from magis.analysis.hazards import dependency_graph
from magis.aten.splits import Split
from magis.fission.grow import connected
from magis.fission.suffix import axes, places, suffix
from magis.ir import Graph

PLACES = 8
"""Positions of the forward pass that are looked at, besides the first one and the loss head."""
LEAST = 200
"""A piece must hold so much of the step's bytes for itself (the reciprocal). Seen in fourteen networks: pieces that
gain something hold a fiftieth and more, stretches between two dropouts less than a thousandth."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Connected operators (by position) and how they are cut; ``at`` is the first of them, ``nbytes`` what they hold at
    most for themselves."""

    at: int
    cuts: Mapping[int, Split]
    nbytes: int


def pieces(graph: Graph) -> list[Piece]:
    """The pieces of all places that are worth a loop, each once, those that hold most first; the graph free of needless
    constraints (``rewrite.untangle``)."""
    whole = graph.persistent_bytes() + own_bytes(graph, dict.fromkeys(range(len(graph.ops)), 0), 1)[0]
    worth = (piece for piece in _every(graph) if piece.nbytes * LEAST >= whole)
    return sorted(worth, key=lambda piece: -piece.nbytes)


def _every(graph: Graph) -> Iterator[Piece]:
    seen: set[tuple[tuple[int, Split], ...]] = set()
    dag = dependency_graph(graph)
    for axis in axes(graph):
        for at in places(graph, axis, PLACES):
            found = heaviest(graph, suffix(graph, axis, at, dag).cuts, dag)
            if found is not None and (cuts := tuple(sorted(found.cuts.items()))) not in seen:
                seen.add(cuts)
                yield found


def heaviest(graph: Graph, cuts: Mapping[int, Split], dag: rx.PyDiGraph[int, None]) -> Piece | None:
    """Of the connected pieces of some operators the one that holds most; None of none. ``dag`` is the graph's."""
    regions = connected(graph, cuts, 1, dag)
    if not regions:
        return None
    owner = {position: number for number, region in enumerate(regions) for position in region.cuts}
    held = own_bytes(graph, owner, len(regions))
    best = max(range(len(regions)), key=held.__getitem__)
    return Piece(min(regions[best].cuts), regions[best].cuts, held[best])


def own_bytes(graph: Graph, owner: Mapping[int, int], count: int) -> list[int]:
    """Per piece: most bytes, in program order, of temporary storages that no operator outside of it touches and the
    caller does not get."""
    span: dict[int, tuple[int, int]] = {}
    returned = {graph.values[value].storage for value in graph.outputs}
    holder: dict[int, int | None] = {}
    for position, op in enumerate(graph.ops):
        mine = owner.get(position)
        for storage in {graph.values[value].storage for value in (*op.inputs(), *op.made())}:
            first, _ = span.get(storage, (position, position))
            span[storage] = (first, position)
            holder[storage] = mine if holder.get(storage, mine) == mine else None
    change: list[dict[int, int]] = [{} for _ in range(count)]
    for storage, number in holder.items():
        if number is not None and graph.storages[storage].kind == "temporary" and storage not in returned:
            (first, last), nbytes = span[storage], graph.storages[storage].nbytes
            change[number][first] = change[number].get(first, 0) + nbytes
            change[number][last + 1] = change[number].get(last + 1, 0) - nbytes
    return [max(accumulate(each[at] for at in sorted(each)), default=0) for each in change]
