"""The D-Graph (paper): which dimensions of which tensors are one and the same axis of the computation.

    c = mm(a, b)     a.0 - c.0     a.1 - (sum of mm)     b.0 - (sum of mm)     b.1 - c.1

Vertices are dimensions of tensors and reduction axes of operators; the labels of an operator (``magis.aten.splits``)
are its edges. A connected component is an axis that runs through the step; the operators that have exactly one way to
be cut along it are the sub-graph that it induces. We depart from the paper in this: weight updates, which float, and
random operators are never in it; dimensions count from 0; what an operator without labels does is unknown, it has no
vertex; an axis ends where windows overlap (halo rows), on the side that needs rows of other parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import rustworkx as rx

from magis.aten.splits import Split, splits
from magis.ir import Graph


class Vertex(NamedTuple):
    """A dimension of a tensor ("dim", value, dimension), or a reduction axis ("axis", position of the operator, number
    of its split)."""

    kind: str
    of: int
    number: int


@dataclass(frozen=True, eq=False)
class Component:
    """A connected component of the D-Graph, and the operators (by position) with exactly one way to be cut in it."""

    vertices: frozenset[Vertex]
    cuts: Mapping[int, Split]


def vertices_of(graph: Graph, position: int, number: int, split: Split) -> tuple[list[Vertex], list[Vertex]]:
    """Vertices of a split of the operator at a position: those of its inputs, and those of its outputs with the
    reduction axis, if the parts of an output combine."""
    op = graph.ops[position]
    taken = zip(op.inputs(), split.inputs, strict=True)
    sources = [Vertex("dim", value, dim) for value, dim in taken if isinstance(dim, int)]
    made = list(zip(op.outputs, split.outputs, strict=True))
    targets = [Vertex("dim", value, how) for value, how in made if value is not None and isinstance(how, int)]
    if any(not isinstance(how, int) and how not in (None, "same") for _, how in made):
        targets.append(Vertex("axis", position, number))
    return list(dict.fromkeys(sources)), list(dict.fromkeys(targets))


def dimension_edges(graph: Graph) -> Iterator[tuple[Vertex, Vertex]]:
    """The edges, in program order; where a split has vertices on one side only, it joins them in a row."""
    for position, number, split in _ways(graph):
        sources, targets = vertices_of(graph, position, number, split)
        if sources and targets:
            yield from ((source, target) for source in sources for target in targets)
        else:
            alone = sources or targets
            yield from zip(alone[:1] + alone[:-1], alone, strict=True)


def _ways(graph: Graph) -> Iterator[tuple[int, int, Split]]:
    """Position, number and split, of the operators that may be split."""
    for position, op in enumerate(graph.ops):
        if op.random or op.phase == "update" or op.body is not None:
            continue
        for number, split in enumerate(splits(op, graph.values)):
            yield position, number, split


def components(graph: Graph) -> tuple[Component, ...]:
    """The connected components, in the order in which the program meets them."""
    number_of: dict[Vertex, int] = {}
    links: rx.PyGraph[Vertex, None] = rx.PyGraph(multigraph=False)
    for source, target in dimension_edges(graph):
        for vertex in (source, target):
            if vertex not in number_of:
                number_of[vertex] = links.add_node(vertex)
        if source != target:
            links.add_edge(number_of[source], number_of[target], None)
    groups = sorted(sorted(group) for group in rx.connected_components(links))
    owner = {node: index for index, group in enumerate(groups) for node in group}
    ways: list[dict[int, list[Split]]] = [{} for _ in groups]
    for position, number, split in _ways(graph):
        sources, targets = vertices_of(graph, position, number, split)
        for vertex in (sources or targets)[:1]:
            ways[owner[number_of[vertex]]].setdefault(position, []).append(split)
    return tuple(
        Component(frozenset(links[node] for node in group), {p: each[0] for p, each in own.items() if len(each) == 1})
        for group, own in zip(groups, ways, strict=True)
    )
