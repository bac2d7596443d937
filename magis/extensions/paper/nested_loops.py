"""Enabled nodes of an F-Tree as loops, side by side and nested, evaluated level by level.

``magis.search.loop_nest`` compiles them. Every loop body is a step of its own with the tensor sizes of one part; to the
enclosing step a loop is one node, whose time is that of its body times the number of parts, and whose workspace is the
body's peak. A decision (storage of the original step -> flag of ``simulate.events``) applies wherever the tensor is
made: outside of loops, or in a body as a part of it, identified by ``Op.origin``. Outputs of a loop are never
recomputed from outside, which would run the whole loop again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from magis.errors import VerifyError
from magis.extensions.paper.ftree import FTree, Node
from magis.fission.expand import expand as as_loop
from magis.fission.part_sums import with_direct_sums, with_sums_apart
from magis.fission.region import Region
from magis.graph import Graph, Loop, Op
from magis.ops.splits import Split, splits
from magis.rewrite.realize import realize
from magis.search.loop_nest import LoopNest, with_loops
from magis.search.moves import giving_back, hot, saving
from magis.simulate.arrays import NodeStep
from magis.simulate.evaluator import Evaluation, Evaluator
from magis.simulate.problem import KEEP, SWAP, Bools, Int8s, Int32s

Decisions = Mapping[int, int]


@dataclass(frozen=True, eq=False)
class LoopFrame:
    """Compiled graph of one level, the original storages of its storages, and the frames of its loops."""

    nest: LoopNest
    evaluator: Evaluator
    """Evaluator in program order, with the figures of loops without decisions."""
    names: tuple[int, ...]
    """[s] Storage of the original step that each storage is equal to, or a part of; -1 for none."""
    places: Mapping[int, tuple[int, ...]]
    """Storages of this level by storage of the original step."""
    handed: Bools
    """[s] True if a loop makes the storage."""
    inner: tuple[tuple[int, LoopFrame], ...]
    """Frames of loops, each with the loop's node."""


@dataclass(frozen=True)
class Move:
    """Change of a tensor's flag (keep, recompute, swap) in the original step; ``inside``: in a loop's body."""

    storage: int
    flag: int
    inside: bool
    rank: int = field(default=0, compare=False)
    """Rank among moves of the same kind and level, most bytes per nanosecond first."""


@dataclass(frozen=True, eq=False)
class LoopView:
    """Peak of an evaluated step: its tensors, and the moves that may lower it."""

    figures: Evaluation
    evaluator: Evaluator
    """Evaluator of the outermost level."""
    hot: Mapping[int, int]
    """Memory hot-spots: storage of the original step -> bytes in memory at the peak."""
    moves: tuple[Move, ...]
    """Rematerializations, swaps and their inverses on hot-spots."""


def frame_of(nest: LoopNest, original: Graph, *, inside: bool = False) -> LoopFrame:
    """Return the frame of a compiled graph; operators in bodies have operators of ``original`` as their origin."""
    compiled, problem = nest.compiled, nest.compiled.problem
    known = _body_names(compiled.graph, original) if inside else {storage: storage for storage in original.storages}
    names = tuple(known.get(storage, -1) for storage in compiled.storages)
    places: dict[int, tuple[int, ...]] = {}
    for place, name in enumerate(names):
        if name >= 0:
            places[name] = (*places.get(name, ()), place)
    inner = tuple((node, frame_of(body, original, inside=True)) for node, body in nest.loops)
    handed = np.isin(problem.producer, np.array([node for node, _ in inner], dtype=np.int64))
    evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
    return LoopFrame(nest, evaluator, names, places, handed, inner)


def _body_names(graph: Graph, original: Graph) -> dict[int, int]:
    """Map each storage of a body to the storage of the original step that it is a part of."""
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.origin is None or op.target.startswith("magis."):
            continue
        for mine, theirs in zip(op.outputs, original.ops[op.origin].outputs, strict=True):
            if mine is not None and theirs is not None:
                found.setdefault(graph.values[mine].storage, original.values[theirs].storage)
    return found


def flags_of(level: LoopFrame, decisions: Decisions) -> Int8s:
    """Return the flags of one level; tensors without a decision are kept until their last use."""
    flags = np.full(len(level.names), KEEP, dtype=np.int8)
    for storage, flag in decisions.items():
        for place in level.places.get(storage, ()):
            if flag == SWAP or not level.handed[place]:
                flags[place] = flag
    return flags


def judge(level: LoopFrame, decisions: Decisions, order: Int32s | None = None) -> Evaluation:
    """Evaluate one level (of a loop's body, one part); ``order`` is an order of its nodes, None for program order."""
    return _judged(level, decisions, order)[0]


def step_with_loops(level: LoopFrame, decisions: Decisions) -> NodeStep:
    """Return the evaluator's arrays of a level, with the costs of its loops under these decisions."""
    step = level.evaluator.step
    if not level.inner:
        return step
    ns, ws, tensor, copies = step.ns.copy(), step.ws.copy(), step.tensor.copy(), step.copies.copy()
    for node, other in level.inner:
        figures, inside = _judged(other, decisions, None)
        ns[:, node] = other.nest.parts * figures.latency_ns
        ws[:, node] = figures.peak
        tensor[:, node] = figures.tensor_peak
        copies[node] = figures.swaps > 0 or inside.step.copies.any()
    return step._replace(ns=ns, ws=ws, tensor=tensor, copies=copies)


def _judged(level: LoopFrame, decisions: Decisions, order: Int32s | None) -> tuple[Evaluation, Evaluator]:
    evaluator = level.evaluator
    if level.inner or order is not None:
        order = evaluator.order if order is None else order
        evaluator = Evaluator(evaluator.problem, order, step_with_loops(level, decisions))
    return evaluator.evaluate(flags_of(level, decisions)), evaluator


def view_at_peak(
    level: LoopFrame, decisions: Decisions, order: Int32s | None = None, *, inside: bool = False
) -> LoopView:
    """Evaluate a level, and return the tensors and moves at its peak, including those of a loop that runs there."""
    figures, evaluator = _judged(level, decisions, order)
    flags = flags_of(level, decisions)
    alive = hot(evaluator)
    nbytes = evaluator.problem.nbytes
    found = {level.names[s]: int(nbytes[s]) for s in np.flatnonzero(alive).tolist() if level.names[s] >= 0}
    moves = list(_moves(level, evaluator, flags, alive, inside=inside))
    at = int(evaluator.runs[evaluator.peak_run]) >> 1
    for node, other in level.inner:
        if node == at:
            below = view_at_peak(other, decisions, inside=True)
            found = {**below.hot, **found}
            moves += below.moves
    return LoopView(figures, evaluator, found, tuple(dict.fromkeys(sorted(moves, key=lambda move: move.rank))))


def _moves(level: LoopFrame, evaluator: Evaluator, flags: Int8s, alive: Bools, *, inside: bool) -> Iterator[Move]:
    swaps = evaluator.problem.xfer_ns_per_byte > 0.0
    for rank, (storage, flag) in enumerate(saving(evaluator, flags, len(flags) * 2, allow_swap=swaps)):
        if level.names[storage] >= 0 and (flag == SWAP or not level.handed[storage]):
            yield Move(level.names[storage], flag, inside, rank)
    for rank, storage in enumerate(giving_back(evaluator, flags)):
        if level.names[storage] >= 0 and alive[storage]:
            yield Move(level.names[storage], KEEP, inside, rank)


def realized(level: LoopFrame, decisions: Decisions, order: Int32s | None = None) -> Graph:
    """Return the graph of a level with all decisions applied, including those inside of loops."""
    bodies = {node: Loop(other.nest.parts, realized(other, decisions)) for node, other in level.inner}
    _, evaluator = _judged(level, decisions, order)
    return realize(with_loops(level.nest.compiled, bodies), evaluator.events())


# Enabled nodes of an F-Tree as loops, nested ones as loops in loops: nodes {0-8, n = 2} > {3-5, n = 4} become a loop of
# 2 parts whose body has a loop of 4 parts. The ``origin`` of every operator in a body is the operator of the graph that
# it is a part of, at any depth.


class Refusal(Exception):  # noqa: N818  (no error: the answer "not these")
    """Raised if the enabled nodes cannot all be loops."""


def loops_for_tree(graph: Graph, tree: FTree) -> Graph:
    """Return the graph with a loop for every enabled node. Raises Refusal if they cannot all be loops.

    Each candidate was legal alone on the whole graph. Together, or at the sizes of a part, they may be illegal: two
    regions may depend on each other, and an operator may have no split in a part of size 1.
    """
    return _loops(graph, _Original(graph), tree, -1)


class _Original:
    """Lookup of the original operator from which an operator of a rewritten graph derives."""

    def __init__(self, graph: Graph) -> None:
        self.ops = graph.ops
        self.maker = {value: position for position, op in enumerate(graph.ops) for value in op.made()}

    def position(self, op: Op, *, inside: bool) -> int:
        """Return the position in the original: in a body by origin, outside by outputs; -1 for ``magis.`` operators."""
        if op.target.startswith("magis."):
            return -1
        if inside:
            return -1 if op.origin is None else op.origin
        return next((self.maker[value] for value in op.made()), -1)


def _loops(graph: Graph, original: _Original, tree: FTree, parent: int) -> Graph:
    """Return the graph (the body of node ``parent``'s loop) with loops for the next enabled nodes below the parent."""
    for index in tree.enabled():
        above = next((other for other in tree.ancestors(index) if tree.nodes[other].enabled), -1)
        if above == parent:
            graph = _loop(graph, original, tree, index, inside=parent >= 0)
    return graph


def _loop(graph: Graph, original: _Original, tree: FTree, index: int, *, inside: bool) -> Graph:
    """Return the graph with the loop of one node, including nested loops."""
    node = tree.nodes[index]
    place = {original.position(op, inside=inside): at for at, op in enumerate(graph.ops)}
    region = Region(_cuts(graph, node, place), node.parts)
    try:
        looped = as_loop(graph, region)
    except VerifyError as error:  # no legal region, or a kernel refuses the size of a part
        raise Refusal(str(error)) from error
    stands = {graph.ops[at].id: position for position, at in place.items()}
    known = {id(op.body) for op in graph.ops}
    at, op, loop = next((a, op, op.body) for a, op in enumerate(looped.ops) if op.body and id(op.body) not in known)
    named = [replace(each, origin=None if each.origin is None else stands[each.origin]) for each in loop.graph.ops]
    # operators by themselves, as the nested loops cut them
    filled = with_direct_sums(_loops(with_sums_apart(replace(loop.graph, ops=tuple(named))), original, tree, index))
    return replace(looped, ops=(*looped.ops[:at], replace(op, body=Loop(loop.parts, filled)), *looped.ops[at + 1 :]))


def _cuts(graph: Graph, node: Node, place: Mapping[int, int]) -> dict[int, Split]:
    """Return the splits of a node's operators by their positions in a graph, which must equal the node's own splits."""
    found: dict[int, Split] = {}
    for position in node.positions:
        if position not in place:
            raise Refusal(f"operator {position} of the step is not where its region is")
        at, wanted = place[position], node.cuts[position]
        ways = [
            split for split in splits(graph.ops[at], graph.values) if replace(split, extent=wanted.extent) == wanted
        ]
        if len(ways) != 1:
            raise Refusal(f"operator {position} of the step cannot be cut within a part as it can be cut whole")
        found[at] = ways[0]
    return found
