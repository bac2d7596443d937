"""D-Graph of the paper: axes of dimensions, their dominator trees, and the estimated saving of splits.

    heat(v)  = bytes of hot-spots (tensors in memory at the peak) made by operators that v strictly dominates
    score(v) = (1 - 1/n) heat(v) - bytes of inputs of those operators that are not hot-spots

Both are about the operators to split, T.des(v) without v itself. Deviations from the paper: the inputs of the step
together are the root, so that all operators dominated by them are a candidate, too; an operator of the axis without
predecessors on the axis is a child of the root if it depends on an input of the step (not on weights, targets and
constants), else it is left out; bytes are those of storages, so views have none, and persistent memory does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import rustworkx as rx

from magis.graph import Graph
from magis.graph.hazards import is_pure_view
from magis.ops.splits import Split, splits

Matrix = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
ROOT = 0


@dataclass(frozen=True, eq=False)
class Dominators:
    """Dominator tree of one axis: node 0 is the root, node i > 0 the operator at ``positions[i - 1]``."""

    positions: tuple[int, ...]
    parents: tuple[int, ...]
    """[n + 1] immediate dominators; the root is its own."""
    above: Matrix
    """[n + 1, n + 1] True if node j strictly dominates node i."""
    made: Mapping[int, int]
    """Node that makes each temporary storage."""
    taken: tuple[int, ...]
    """[u] Temporary storages that operators of the tree read."""
    outside: Matrix
    """[u, n + 1] True if operators dominated by node j read storage u, made by an operator that j does not dominate."""

    def below(self, node: int) -> tuple[int, ...]:
        """Return the positions of the operators that a node strictly dominates."""
        return tuple(self.positions[i - 1] for i in np.flatnonzero(self.above[:, node]).tolist())


def depends_on_inputs(graph: Graph) -> frozenset[int]:
    """Return the positions of the operators that depend on the inputs of the step through data flow."""
    known = {value for value in graph.inputs if graph.values[value].name.startswith("input:")}
    found = set()
    for position, op in enumerate(graph.ops):
        if not known.isdisjoint(op.inputs()):
            found.add(position)
            known.update(op.made())
    return frozenset(found)


def dominators(graph: Graph, cuts: Mapping[int, Split], fed: frozenset[int]) -> Dominators:
    """Build the dominator tree of an axis' operators; ``fed`` are positions that depend on the step's inputs."""
    everything = [-1, *sorted(cuts)]
    number = {position: index for index, position in enumerate(everything)}
    dag: rx.PyDiGraph[int, None] = rx.PyDiGraph(multigraph=False)
    dag.add_nodes_from(everything)
    dag.add_edges_from([(number[before], number[after], None) for before, after in flow(graph, cuts, fed)])
    parent_of = {everything[node]: everything[parent] for node, parent in rx.immediate_dominators(dag, 0).items()}
    positions = tuple(position for position in everything[1:] if position in parent_of)
    node_of = {-1: ROOT} | {position: index for index, position in enumerate(positions, 1)}
    parents = (ROOT, *(node_of[parent_of[position]] for position in positions))
    above = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    for node, parent in enumerate(parents[1:], 1):  # program order: the parent's row is complete
        above[node] = above[parent]
        above[node, parent] = True
    return _with_storages(graph, positions, parents, above)


def flow(graph: Graph, cuts: Mapping[int, Split], fed: frozenset[int]) -> list[tuple[int, int]]:
    """Return the data-flow edges among operators, as pairs of positions; -1 is the root."""
    maker = {value: position for position in cuts for value in graph.ops[position].made()}
    edges: list[tuple[int, int]] = []
    for position in sorted(cuts):
        before = {maker[value] for value in graph.ops[position].inputs() if value in maker} - {position}
        edges += [(other, position) for other in sorted(before)]
        if not before and position in fed:
            edges.append((-1, position))
    return edges


def _with_storages(graph: Graph, positions: tuple[int, ...], parents: tuple[int, ...], above: Matrix) -> Dominators:
    made: dict[int, int] = {}
    users: dict[int, list[int]] = {}
    for node, position in enumerate(positions, 1):
        op = graph.ops[position]
        for value in op.inputs():
            users.setdefault(graph.values[value].storage, []).append(node)
        if not is_pure_view(graph.values, op):
            for value in op.made():
                made.setdefault(graph.values[value].storage, node)
    made = {storage: node for storage, node in made.items() if graph.storages[storage].kind == "temporary"}
    taken = tuple(sorted(storage for storage in users if graph.storages[storage].kind == "temporary"))
    outside = np.zeros((len(taken), len(parents)), dtype=np.bool_)
    for row, storage in enumerate(taken):
        outside[row] = above[users[storage]].any(axis=0)
        if storage in made:
            outside[row] &= ~above[made[storage]]
    return Dominators(positions, parents, above, made, taken, outside)


def heat(tree: Dominators, hot: Mapping[int, int]) -> Int64s:
    """Return [n + 1] bytes of hot-spots (storage -> bytes in memory at the peak) made below each node."""
    nbytes = np.zeros(len(tree.parents), dtype=np.int64)
    for storage in hot.keys() & tree.made.keys():
        nbytes[tree.made[storage]] += hot[storage]
    return np.asarray(nbytes @ tree.above, dtype=np.int64)


def scores(graph: Graph, tree: Dominators, hot: Mapping[int, int], parts: int = 2) -> Int64s:
    """Return [n + 1] scores of the nodes times ``parts``, so that they are integers."""
    cold = [0 if storage in hot else graph.storages[storage].nbytes for storage in tree.taken]
    inputs = np.asarray(cold, dtype=np.int64) @ tree.outside
    return np.asarray((parts - 1) * heat(tree, hot) - parts * inputs, dtype=np.int64)


# D-Graph (paper): which dimensions of which tensors are one axis of the computation.
#
#     c = mm(a, b)     a.0 - c.0     a.1 - (sum of mm)     b.0 - (sum of mm)     b.1 - c.1
#
# Vertices are dimensions of tensors and reduction axes of operators; edges are the splits of an operator
# (``magis.ops.splits``). A connected component is an axis through the step; it induces the sub-graph of the operators
# with exactly one split along it. Deviations from the paper: weight updates and random operators are never included;
# dimensions count from 0; an operator without known splits has no vertex; an axis ends where windows overlap (halo
# rows), on the side that needs rows of other parts.


class Vertex(NamedTuple):
    """Tensor dimension ("dim", value, dimension), or reduction axis ("axis", operator's position, split's index)."""

    kind: str
    of: int
    number: int


@dataclass(frozen=True, eq=False)
class Component:
    """Connected component of the D-Graph, and the operators (by position) with exactly one split along it."""

    vertices: frozenset[Vertex]
    cuts: Mapping[int, Split]


def vertices_of(graph: Graph, position: int, number: int, split: Split) -> tuple[list[Vertex], list[Vertex]]:
    """Return the vertices of a split of the operator at a position: those of its inputs, and those of its outputs, with
    the reduction axis if the parts of an output are combined."""
    op = graph.ops[position]
    taken = zip(op.inputs(), split.inputs, strict=True)
    sources = [Vertex("dim", value, dim) for value, dim in taken if isinstance(dim, int)]
    made = list(zip(op.outputs, split.outputs, strict=True))
    targets = [Vertex("dim", value, how) for value, how in made if value is not None and isinstance(how, int)]
    if any(not isinstance(how, int) and how not in (None, "same") for _, how in made):
        targets.append(Vertex("axis", position, number))
    return list(dict.fromkeys(sources)), list(dict.fromkeys(targets))


def dimension_edges(graph: Graph) -> Iterator[tuple[Vertex, Vertex]]:
    """Yield the edges in program order; if a split has vertices on only one side, they are chained."""
    for position, number, split in _numbered_splits(graph):
        sources, targets = vertices_of(graph, position, number, split)
        if sources and targets:
            yield from ((source, target) for source in sources for target in targets)
        else:
            alone = sources or targets
            yield from zip(alone[:1] + alone[:-1], alone, strict=True)


def _numbered_splits(graph: Graph) -> Iterator[tuple[int, int, Split]]:
    """Yield position, index and split of all operators that may be split."""
    for position, op in enumerate(graph.ops):
        if op.random or op.phase == "update" or op.body is not None:
            continue
        for number, split in enumerate(splits(op, graph.values)):
            yield position, number, split


def components(graph: Graph) -> tuple[Component, ...]:
    """Return the connected components, ordered by first occurrence in the program."""
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
    for position, number, split in _numbered_splits(graph):
        sources, targets = vertices_of(graph, position, number, split)
        for vertex in (sources or targets)[:1]:
            ways[owner[number_of[vertex]]].setdefault(position, []).append(split)
    return tuple(
        Component(frozenset(links[node] for node in group), {p: each[0] for p, each in own.items() if len(each) == 1})
        for group, own in zip(groups, ways, strict=True)
    )
