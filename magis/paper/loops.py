"""The enabled nodes of an F-Tree as loops, nested ones as loops within loops.

    nodes  {0-8, n = 2} > {3-5, n = 4}   ->   a loop of 2 parts whose body holds a loop of 4 parts

Every operator in a body says, as its ``origin``, which operator of the graph it is a part of, at any depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from magis.aten.splits import Split, splits
from magis.errors import VerifyError
from magis.fission.expand import expand
from magis.fission.region import Region, region_problems
from magis.ir import Graph, Loop, Op
from magis.paper.ftree import FTree, Node


@dataclass(frozen=True)
class Refusal:
    """Why the enabled nodes cannot all be loops."""

    reason: str


def apply(graph: Graph, tree: FTree) -> Graph | Refusal:
    """The graph with a loop for every enabled node.

    Each candidate was legal by itself on the whole graph. Together, or at the sizes of a part, they need not be: two
    regions may wait for each other, and what had one way to be cut may have none in a part of size 1.
    """
    return _loops(graph, _Original(graph), tree, -1)


class _Original:
    """Which operator of the original graph an operator stands for."""

    def __init__(self, graph: Graph) -> None:
        self.ops = graph.ops
        self.maker = {value: position for position, op in enumerate(graph.ops) for value in op.made()}

    def position(self, op: Op, *, inside: bool) -> int:
        """In a body by its origin, outside by what it makes; -1 for loops, and what only loops have."""
        if op.target.startswith("magis."):
            return -1
        if inside:
            return -1 if op.origin is None else op.origin
        return next((self.maker[value] for value in op.made()), -1)


def _loops(graph: Graph, original: _Original, tree: FTree, parent: int) -> Graph | Refusal:
    """The graph, the body of node ``parent``'s loop, with loops for the enabled nodes next below."""
    for index in _next_enabled(tree, parent):
        found = _loop(graph, original, tree, index, inside=parent >= 0)
        if isinstance(found, Refusal):
            return found
        graph = found
    return graph


def _next_enabled(tree: FTree, parent: int) -> list[int]:
    """Enabled nodes whose closest enabled ancestor is ``parent``."""
    return [
        index
        for index in tree.enabled()
        if next((other for other in tree.ancestors(index) if tree.nodes[other].enabled), -1) == parent
    ]


def _loop(graph: Graph, original: _Original, tree: FTree, index: int, *, inside: bool) -> Graph | Refusal:
    """The graph with the loop of one node, and what is in it."""
    node = tree.nodes[index]
    place = {original.position(op, inside=inside): at for at, op in enumerate(graph.ops)}
    cuts = _cuts(graph, node, place)
    if isinstance(cuts, Refusal):
        return cuts
    region = Region(cuts, node.parts)
    for problem in region_problems(graph, region):
        return Refusal(problem)
    try:
        looped = expand(graph, region)
    except VerifyError as error:  # a kernel refuses the size of a part: known by asking it only
        return Refusal(str(error))
    stands = {graph.ops[at].id: position for position, at in place.items()}
    known = {id(op.body) for op in graph.ops if op.body is not None}
    at = next(at for at, op in enumerate(looped.ops) if op.body is not None and id(op.body) not in known)
    op = looped.ops[at]
    if op.body is None:
        return Refusal("no loop was made")
    body = op.body.graph
    named = [replace(each, origin=stands[each.origin] if each.origin is not None else None) for each in body.ops]
    filled = _loops(replace(body, ops=tuple(named)), original, tree, index)
    if isinstance(filled, Refusal):
        return filled
    return replace(looped, ops=(*looped.ops[:at], replace(op, body=Loop(op.body.parts, filled)), *looped.ops[at + 1 :]))


def _cuts(graph: Graph, node: Node, place: Mapping[int, int]) -> dict[int, Split] | Refusal:
    """Where the node's operators stand in a graph, and how each is cut there: at a part's size, as at its own."""
    found: dict[int, Split] = {}
    for position in node.positions:
        if position not in place:
            return Refusal(f"operator {position} of the step is not where its region is")
        at, wanted = place[position], node.cuts[position]
        ways = [
            split for split in splits(graph.ops[at], graph.values) if replace(split, extent=wanted.extent) == wanted
        ]
        if len(ways) != 1:
            return Refusal(f"operator {position} of the step cannot be cut within a part as it can be cut whole")
        found[at] = ways[0]
    return found
