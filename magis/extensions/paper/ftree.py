"""The F-Tree (paper, Algorithm 1): candidates for fission from the hot-spots of a schedule, and its mutations.

A node is a sub-graph with a cut of each operator (S, D) and a number of parts n: 1 for a candidate, more for a node
that is *enabled*. What hangs below a node is a subset of it.

Where we depart from the paper, or it is silent: candidates of different axes may overlap without one holding the other.
Each hangs below the smallest node that holds it, so siblings may overlap, but of two enabled nodes one is always an
ancestor of the other or they share no operator (``problems``); a mutation that would break this is not offered. Nested
enabled nodes along one axis divide it together. Legality of candidates is what ``region_problems`` says, not an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from magis.extensions.paper.dgraph import Component, Dominators, components, depends_on_inputs, dominators, scores
from magis.fission.candidates import most_parts
from magis.fission.region import Region, region_problems
from magis.graph import Graph
from magis.ops.splits import Split

LEVELS = 4
"""Levels of heat (paper: L = 4 is best)."""


@dataclass(frozen=True)
class Node:
    """A candidate (parts == 1) or an enabled region (more), along the axis number ``component`` of the step."""

    component: int
    positions: tuple[int, ...]
    """Positions of the operators, ascending."""
    parts: int
    extent: int = field(compare=False)
    """Size that the number of parts must divide, times the parts of nested nodes along the same axis."""
    cuts: Mapping[int, Split] = field(compare=False, repr=False)

    @property
    def enabled(self) -> bool:
        return self.parts > 1


@dataclass(frozen=True)
class FTree:
    """Nodes, each behind its parent; ``parents[i]`` is the index of node i's, -1 at the top."""

    nodes: tuple[Node, ...] = ()
    parents: tuple[int, ...] = ()

    def children(self, index: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == index]

    def ancestors(self, index: int) -> Iterator[int]:
        """Yield the ancestors from the parent up."""
        while (index := self.parents[index]) >= 0:
            yield index

    def descendants(self, index: int) -> list[int]:
        return [other for other in range(len(self.nodes)) if index in self.ancestors(other)]

    def enabled(self) -> list[int]:
        return [index for index, node in enumerate(self.nodes) if node.enabled]

    def parent_along(self, index: int) -> int:
        """Return the closest ancestor along the node's own axis; -1: there is none."""
        own = self.nodes[index].component
        return next((other for other in self.ancestors(index) if self.nodes[other].component == own), -1)

    def with_parts(self, parts: Mapping[int, int]) -> FTree:
        """Return the tree with other numbers of parts at some nodes."""
        nodes = tuple(replace(n, parts=parts[i]) if i in parts else n for i, n in enumerate(self.nodes))
        return replace(self, nodes=nodes)


def parts_problems(tree: FTree) -> Iterator[str]:
    """Yield a line for each rule that the enabled nodes break; the shape of the tree is taken for granted."""
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
    """Multiply the parts of a node with those of its ancestors along the same axis."""
    count = tree.nodes[index].parts
    for other in tree.ancestors(index):
        if tree.nodes[other].component == tree.nodes[index].component:
            count *= tree.nodes[other].parts
    return count


def arranged(nodes: Sequence[Node]) -> FTree:
    """Arrange nodes as a tree: each below the smallest one that holds it, the first of several; doubles once, enabled
    if one of them is."""
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
    """Algorithm 1 on one graph, for any hot-spots: all that does not depend on them is worked out once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.components: tuple[Component, ...] = components(graph)
        fed = depends_on_inputs(graph)
        self.trees: tuple[Dominators, ...] = tuple(dominators(graph, each.cuts, fed) for each in self.components)
        self._known: dict[tuple[int, int], Node | None] = {}

    def tree(self, hot: Mapping[int, int], *, levels: int = LEVELS, kept: Sequence[Node] = ()) -> FTree:
        """Build the F-Tree for hot-spots (temporary storage -> bytes in memory at the peak), with ``kept`` in it."""
        found = list(kept)
        for component, tree in enumerate(self.trees):
            for node in hottest_nodes(self.graph, tree, hot, levels):
                candidate = self.candidate(component, node)
                if candidate is not None:
                    found.append(candidate)
        return arranged(found)

    def candidate(self, component: int, node: int) -> Node | None:
        """Return the F-Tree node of all that a node of an axis' dominator tree dominates; None if that is illegal."""
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
    """List the dominators that Algorithm 1 takes: at each level of normalized score those with none of it below."""
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


# The mutation rules of the F-Tree (paper): each yields named trees, and only ones that keep the rules of ``ftree``.
#
#     enable   a disabled leaf, or the disabled parent of an enabled node without enabled ancestors
#     lift     an enabled node without enabled ancestors goes, its parent comes in its place
#     disable  an enabled node without enabled descendants
#     mutate   the parts of an enabled node to the next larger number that divides the dimension
#
# Leaves and parents are meant along one axis: a candidate of another axis that happens to lie inside would else keep a
# node from being enabled, and to lift would change the axis. The paper does not say how many parts a node starts with:
# the least that is legal, or, lifted, as many as the node that goes if they divide the parent's dimension.


@dataclass(frozen=True)
class Mutation:
    """A tree and the rule that made it."""

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
    """Yield trees with a larger region instead of one of the outermost."""
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
    """Yield trees with one node in more parts."""
    for index in tree.enabled():
        yield from _with_fewest_parts(f"mutate {index}", tree, index, above=tree.nodes[index].parts)


def mutations(tree: FTree) -> Iterator[Mutation]:
    """Yield every tree one mutation away."""
    for rule in (enable, lift, disable, mutate):
        yield from rule(tree)


def is_legal(tree: FTree) -> bool:
    """Return True if the enabled nodes may be enabled together."""
    return not any(parts_problems(tree))


def _tops(tree: FTree) -> list[int]:
    """List the enabled nodes without enabled ancestors."""
    return [i for i in tree.enabled() if not any(tree.nodes[other].enabled for other in tree.ancestors(i))]


def _if_legal(name: str, tree: FTree, parts: Mapping[int, int]) -> Iterator[Mutation]:
    changed = tree.with_parts(parts)
    if is_legal(changed):
        yield Mutation(name, changed)


def _with_fewest_parts(name: str, tree: FTree, index: int, above: int = 1) -> Iterator[Mutation]:
    """Yield the tree with the smallest number of parts above ``above`` that keeps the rules; nothing if none does."""
    extent = tree.nodes[index].extent
    while (above := least_divisor(extent, above)) > 1:
        found = list(_if_legal(f"{name}: n = {above}", tree, {index: above}))
        if found:
            yield from found
            return
