"""Incremental scheduling (PAPER, Algorithm 2): after a rewrite only the stretch of the order around it is ordered anew.

old order                a b [c d e f] g h        d, e are replaced by x
spliced                  a b  c x f    g h        survivors as they stood, new nodes as soon as they can run
extended to waists       a [b c x f g] h
ordered anew             a [b x c g f] h          if the evaluator finds it no worse, else as spliced
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from magis.ir import Op
from magis.schedule.stretches import MOST, Steps, cuts, improved, lives_of
from magis.schedule.waists import OUTSIDE, Precedence
from magis.simulate.compile import Compiled
from magis.simulate.evaluator import Evaluator
from magis.simulate.events import KEEP
from magis.simulate.grouping import Group
from magis.simulate.problem import Int8s, Int32s, Int64s

__all__ = ["incremental_order", "interval", "rescheduled", "splice", "survivors"]

FURTHEST = 20
"""Nodes that the interval grows by on either side (PAPER)."""
ENOUGH = 4
"""It stops growing where a node has fewer beside it (PAPER), once they get more."""


def splice(needs: Precedence, rank: Int64s) -> Int32s:
    """A legal order by rank: positions in the old order; -1 for new nodes, which run as soon as what they need has run.

    Of nodes that may run the one of least rank comes first, then that of least number.
    """
    nodes = len(rank)
    rank = rank.copy()
    waits = np.diff(needs.ptr).tolist()
    after: list[list[int]] = [[] for _ in range(nodes)]
    for node in range(nodes):
        before = needs.before(node).tolist()
        for other in before:
            after[other].append(node)
        if rank[node] < 0 and before:  # numbers follow program order: those before it have their ranks
            rank[node] = max(int(rank[other]) for other in before)
    ranks = rank.tolist()
    ready = [(ranks[node], node) for node in range(nodes) if not waits[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for other in after[node]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (ranks[other], other))
    return np.array(order, dtype=np.int32)


def interval(narrowness: Int64s, order: Int32s, touched: Iterable[int]) -> tuple[int, int]:
    """Positions from the first touched node to behind the last, extended on both sides to where the step is narrow."""
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    places = [int(position[node]) for node in touched]
    beside = narrowness[order].tolist()
    low = _narrow(beside, min(places) - 1, -1)  # runs before the interval
    return low + 1, _narrow(beside, max(places), 1) + 1


def _narrow(beside: Sequence[int], at: int, step: int) -> int:
    """The narrowest position on the way from ``at``; the end of the order is narrow."""
    best = at
    for _ in range(FURTHEST):
        if not 0 <= at < len(beside) or not 0 <= at + step < len(beside):
            return -1 if step < 0 else len(beside) - 1
        if beside[best] == 0:
            break
        at += step
        if beside[at] < beside[best]:
            best = at
        elif beside[best] < min(ENOUGH, beside[at]) and beside[at] != OUTSIDE:
            break
    return best


def incremental_order(
    evaluator: Evaluator, flags: Int8s, touched: Sequence[int], *, steps: Steps | None = None, most: int = MOST
) -> Int32s:
    """The evaluator's order with the interval around touched nodes ordered anew; never with a higher peak."""
    if not len(touched):
        return evaluator.order
    problem = evaluator.problem
    steps = Steps(problem) if steps is None else steps
    before, _ = evaluator.quick(flags)
    low, high = interval(steps.narrowness, evaluator.order, touched)
    stretches = cuts(steps.narrowness, evaluator.order, low, high)
    order = improved(steps, evaluator.order, stretches, lives_of(evaluator), most)
    if np.array_equal(order, evaluator.order):
        return evaluator.order
    after, _ = Evaluator(problem, order, evaluator.step).quick(flags)
    return order if after <= before else evaluator.order


def survivors(old: Compiled, order: Int32s, new: Compiled) -> Int64s:
    """[v] position in the old order of each node of the new graph; -1: it is not in the old one."""
    place = {node_name(old.nodes[node]): at for at, node in enumerate(order.tolist())}
    return np.array([place.get(node_name(group), -1) for group in new.nodes], dtype=np.int64)


def node_name(group: Group) -> tuple[object, ...]:
    """Tells the nodes of a graph apart, and stays the same where a rewrite leaves a node alone."""
    return tuple(_op_name(op) for op in group)


def _op_name(op: Op) -> tuple[object, ...]:
    if op.body is None:
        return op.target, op.made(), op.inputs()
    inside = tuple((each.origin, _op_name(each)) for each in op.body.graph.ops)
    return op.target, op.made(), op.inputs(), op.body.parts, inside


def rescheduled(
    old: Compiled, order: Int32s, new: Compiled, flags: Int8s | None = None, *, most: int = MOST
) -> tuple[Int32s, Int32s]:
    """For a rewritten graph the old order spliced, and that ordered anew around the rewrite."""
    steps = Steps(new.problem)
    rank = survivors(old, order, new)
    spliced = splice(steps.needs, rank)
    touched = np.flatnonzero(rank < 0).tolist()
    flags = np.full(new.problem.n_storages, KEEP, dtype=np.int8) if flags is None else flags
    return spliced, incremental_order(Evaluator(new.problem, spliced), flags, touched, steps=steps, most=most)
