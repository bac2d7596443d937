"""F-Tree of the paper (Algorithm 1): candidates for fission from the hot-spots of a schedule, and its mutations.

A node is a sub-graph with a split of each operator (S, D) and a number of parts n: 1 for a candidate, more for an
*enabled* node. Descendants of a node are subsets of it.

Deviations from the paper, and choices that it leaves open: candidates of different axes may overlap without one
containing the other. The parent of a node is the smallest node that contains it, so siblings may overlap, but two
enabled nodes are either ancestor and descendant or disjoint (``parts_problems``); mutations that would violate this are
not offered. Nested enabled nodes along one axis multiply their parts. The legality of candidates is decided by
``region_problems``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from magis.extensions.paper.dgraph import Component, Dominators, components, depends_on_inputs, dominators, scores
from magis.fission.region import Region, most_parts, region_problems
from magis.graph import Graph
from magis.ops.splits import Split

LEVELS = 4
"""Levels of heat (paper: L = 4 is best)."""


@dataclass(frozen=True)
class Node:
    """Candidate (parts == 1) or enabled region (parts > 1), along the axis with index ``component`` of the step."""

    component: int
    positions: tuple[int, ...]
    """Positions of the operators, ascending."""
    parts: int
    extent: int = field(compare=False)
    """Size that the parts, multiplied with those of nested nodes along the same axis, must divide."""
    cuts: Mapping[int, Split] = field(compare=False, repr=False)

    @property
    def enabled(self) -> bool:
        return self.parts > 1


@dataclass(frozen=True)
class FTree:
    """Tree of nodes, each after its parent; ``parents[i]`` is the index of node i's parent, -1 for a root."""

    nodes: tuple[Node, ...] = ()
    parents: tuple[int, ...] = ()

    def children(self, index: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == index]

    def ancestors(self, index: int) -> Iterator[int]:
        """Yield the ancestors, from the parent up."""
        while (index := self.parents[index]) >= 0:
            yield index

    def descendants(self, index: int) -> list[int]:
        return [other for other in range(len(self.nodes)) if index in self.ancestors(other)]

    def enabled(self) -> list[int]:
        return [index for index, node in enumerate(self.nodes) if node.enabled]

    def parent_along(self, index: int) -> int:
        """Return the closest ancestor along the node's own axis; -1 if there is none."""
        own = self.nodes[index].component
        return next((other for other in self.ancestors(index) if self.nodes[other].component == own), -1)

    def with_parts(self, parts: Mapping[int, int]) -> FTree:
        """Return the tree with the numbers of parts of some nodes replaced."""
        nodes = tuple(replace(n, parts=parts[i]) if i in parts else n for i, n in enumerate(self.nodes))
        return replace(self, nodes=nodes)


def parts_problems(tree: FTree) -> Iterator[str]:
    """Yield a line for each rule that the enabled nodes violate; the shape of the tree is not checked."""
    on = tree.enabled()
    sets = {index: frozenset(tree.nodes[index].positions) for index in on}
    for index in on:
        above = set(tree.ancestors(index))
        for other in on:
            if other < index and other not in above and not sets[index].isdisjoint(sets[other]):
                yield f"nodes {other} and {index} are enabled and overlap"
        if tree.nodes[index].extent % parts_along(tree, index):
            yield f"node {index}: {parts_along(tree, index)} parts do not divide {tree.nodes[index].extent}"


def parts_along(tree: FTree, index: int) -> int:
    """Return the product of the parts of a node and of its ancestors along the same axis."""
    count = tree.nodes[index].parts
    for other in tree.ancestors(index):
        if tree.nodes[other].component == tree.nodes[index].component:
            count *= tree.nodes[other].parts
    return count


def arranged(nodes: Sequence[Node]) -> FTree:
    """Arrange nodes as a tree, each below the smallest node that contains it; merged duplicates are enabled if any
    is."""
    known: dict[tuple[int, tuple[int, ...]], Node] = {}
    for node in nodes:
        key = (node.component, node.positions)
        if key not in known or node.enabled:
            known[key] = node
    ordered = sorted(known.values(), key=lambda node: (-len(node.positions), node.component, node.positions))
    sets = [frozenset(node.positions) for node in ordered]
    parents = [
        max((o for o in range(i) if own <= sets[o]), key=lambda o: (-len(sets[o]), o), default=-1)
        for i, own in enumerate(sets)
    ]
    return FTree(tuple(ordered), tuple(parents))


class Analysis:
    """Algorithm 1 on one graph, for any hot-spots; everything independent of hot-spots is computed once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.components: tuple[Component, ...] = components(graph)
        fed = depends_on_inputs(graph)
        self.trees: tuple[Dominators, ...] = tuple(dominators(graph, each.cuts, fed) for each in self.components)
        self._known: dict[tuple[int, int], Node | None] = {}

    def tree(self, hot: Mapping[int, int], *, levels: int = LEVELS, kept: Sequence[Node] = ()) -> FTree:
        """Return the F-Tree for hot-spots (temporary storage -> bytes in memory at the peak), including ``kept``
        nodes."""
        found = list(kept)
        for component, tree in enumerate(self.trees):
            for node in hottest_nodes(self.graph, tree, hot, levels):
                candidate = self.candidate(component, node)
                if candidate is not None:
                    found.append(candidate)
        return arranged(found)

    def candidate(self, component: int, node: int) -> Node | None:
        """Return the F-Tree node of all operators that a dominator node strictly dominates; None if it is illegal."""
        key = (component, node)
        if key not in self._known:
            positions = self.trees[component].below(node)
            cuts = {position: self.components[component].cuts[position] for position in positions}
            extent = most_parts(cuts)
            parts = least_divisor(extent)
            legal = parts > 1 and not any(region_problems(self.graph, Region(cuts, parts)))
            self._known[key] = Node(component, positions, 1, extent, cuts) if legal else None
        return self._known[key]


def hottest_nodes(graph: Graph, tree: Dominators, hot: Mapping[int, int], levels: int) -> list[int]:
    """Return Algorithm 1's dominators: at each level of normalized score, those with no descendant in the level."""
    score = scores(graph, tree, hot)
    most = int(score.max(initial=0))
    if most <= 0:
        return []
    found: list[int] = []
    for level in range(1, levels + 1):
        within = (score * levels >= level * most) & (score * levels < (level + 1) * most)
        deepest = within & ~(tree.above & within[:, None]).any(axis=0)
        found += np.flatnonzero(deepest).tolist()
    return found


def least_divisor(extent: int, above: int = 1) -> int:
    """Return the smallest divisor of ``extent`` larger than ``above``; 1 if there is none."""
    return next((n for n in range(above + 1, extent + 1) if extent % n == 0), 1)


# Mutation rules of the F-Tree (paper): each yields named, legal trees.
#
#     enable   a disabled leaf, or the disabled parent of an enabled node without enabled ancestors
#     lift     disables an enabled node without enabled ancestors, and enables its parent
#     disable  an enabled node without enabled descendants
#     mutate   raises the parts of an enabled node to the next larger divisor of the dimension
#
# Leaves and parents are meant along one axis: else a candidate of another axis inside a node would keep the node from
# being enabled, and a lift would change the axis. The paper does not say how many parts a node starts with: here the
# smallest legal number, or after a lift the parts of the lifted node if they divide the parent's dimension.


@dataclass(frozen=True)
class Mutation:
    """Tree, and the name of the rule that made it."""

    name: str
    tree: FTree


def enable(tree: FTree) -> Iterator[Mutation]:
    """Yield trees with one more enabled node."""
    parents = {tree.parent_along(index) for index in _tops(tree)}
    inner = {tree.parent_along(index) for index in range(len(tree.nodes))}
    for index, node in enumerate(tree.nodes):
        if not node.enabled and (index in parents or index not in inner):
            yield from _with_fewest_parts(f"enable {index}", tree, index)


def lift(tree: FTree) -> Iterator[Mutation]:
    """Yield trees in which an outermost enabled node is replaced by its parent."""
    for index in _tops(tree):
        parent = tree.parent_along(index)
        if parent < 0:
            continue
        parts = tree.nodes[index].parts
        below = tree.with_parts({index: 1})
        kept = tree.with_parts({index: 1, parent: parts})
        if tree.nodes[parent].extent % parts == 0 and is_legal(kept):
            yield Mutation(f"lift {index} to {parent}", kept)
        else:
            yield from _with_fewest_parts(f"lift {index} to {parent}", below, parent)


def disable(tree: FTree) -> Iterator[Mutation]:
    """Yield trees with one enabled node less."""
    for index in tree.enabled():
        if not any(tree.nodes[other].enabled for other in tree.descendants(index)):
            yield from _if_legal(f"disable {index}", tree, {index: 1})


def mutate(tree: FTree) -> Iterator[Mutation]:
    """Yield trees with more parts at one enabled node."""
    for index in tree.enabled():
        yield from _with_fewest_parts(f"mutate {index}", tree, index, above=tree.nodes[index].parts)


def mutations(tree: FTree) -> Iterator[Mutation]:
    """Yield every tree that one mutation makes."""
    for rule in (enable, lift, disable, mutate):
        yield from rule(tree)


def is_legal(tree: FTree) -> bool:
    """Return True if the enabled nodes may be enabled together."""
    return not any(parts_problems(tree))


def _tops(tree: FTree) -> list[int]:
    """Return the enabled nodes without enabled ancestors."""
    return [i for i in tree.enabled() if not any(tree.nodes[other].enabled for other in tree.ancestors(i))]


def _if_legal(name: str, tree: FTree, parts: Mapping[int, int]) -> Iterator[Mutation]:
    changed = tree.with_parts(parts)
    if is_legal(changed):
        yield Mutation(name, changed)


def _with_fewest_parts(name: str, tree: FTree, index: int, above: int = 1) -> Iterator[Mutation]:
    """Yield the legal tree with the smallest number of parts larger than ``above``; nothing if there is none."""
    extent = tree.nodes[index].extent
    while (above := least_divisor(extent, above)) > 1:
        found = list(_if_legal(f"{name}: n = {above}", tree, {index: above}))
        if found:
            yield from found
            return
