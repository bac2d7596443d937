"""Full and incremental scheduling (paper, Algorithm 2).

old order                a b [c d e f] g h        d, e are replaced by x
spliced                  a b  c x f    g h        old nodes in their old order, new nodes as early as possible
extended to waists       a [b c x f g] h
rescheduled              a [b x c g f] h          if the evaluator finds no higher peak, else as spliced
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

import numba
import numpy as np

from magis.extensions.paper.stretch_order import WIDEST
from magis.extensions.paper.stretches import MOST, Steps, cuts, forced, improved, lives_of
from magis.extensions.paper.waists import NARROW, OUTSIDE, in_parts
from magis.graph import Op
from magis.simulate.arrays import NodeStep
from magis.simulate.compiled_problem import Compiled, Group
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import KEEP, Int8s, Int32s, Int64s, Problem, Rows

FURTHEST = 20
"""Maximum number of nodes by which an interval is extended on either side (paper)."""
ENOUGH = 4
"""An interval stops after a node with fewer incomparable nodes than this, once their number increases (paper)."""


def splice(steps: Steps, rank: Int64s, *, early: bool = False) -> Int32s:
    """Return a legal order by rank: of the ready nodes, the one with the lowest rank runs first, then the lowest index.

    ``rank`` [v] is the position in the old order, -1 for a new node. A new node runs as early as possible if it frees
    at least as many bytes as it allocates, or with ``early``; else right before its first reader.
    """
    needs = steps.needs
    order = np.arange(len(rank))
    after = needs.turned(len(rank))
    placed = rank.copy()
    for node in order[rank < 0][::-1].tolist():  # as late as may be
        placed[node] = placed[after(node)].min(initial=len(rank))
    for node in order[rank < 0].tolist():
        before = placed[needs(node)].max(initial=-1)
        if early or placed[node] == len(rank) or _frees(steps, node, placed):
            placed[node] = before
    return _by_rank(needs, after, placed)


def _frees(steps: Steps, node: int, placed: Int64s) -> bool:
    """Return True if a new node, at its current rank, frees at least as many bytes as it allocates."""
    problem = steps.problem
    freed = 0
    for storage in problem.inputs(node).tolist():
        others = [placed[other] for other in steps.released_by(storage) if other != node]
        if not problem.to_end[storage] and max(others) < placed[node]:
            freed += int(problem.nbytes[storage])
    return freed >= int(problem.nbytes[problem.outputs(node)].sum())


@numba.njit(cache=True)
def _by_rank(needs: Rows, after: Rows, rank: Int64s) -> Int32s:
    nodes = len(rank)
    waits = needs.ptr[1:] - needs.ptr[:-1]
    order = np.empty(nodes, dtype=np.int32)
    key = rank * nodes + np.arange(nodes)
    ready = [key[node] for node in range(nodes) if waits[node] == 0]
    heapq.heapify(ready)
    for place in range(nodes):
        node = heapq.heappop(ready) % nodes
        order[place] = node
        for k in range(after.ptr[node], after.ptr[node + 1]):
            other = after.idx[k]
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, key[other])
    return order


def intervals(narrowness: Int64s, order: Int32s, touched: Iterable[int]) -> list[tuple[int, int]]:
    """Return an interval of positions around each touched node, extended on both sides to a narrow waist.

    Intervals closer to each other than the maximum width of a stretch are joined. The paper uses one interval from the
    first to the last touched node, which is most of a step if a rewrite changes parts of forward and backward.
    """
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    beside = narrowness[order]
    found: list[tuple[int, int]] = []
    for place in sorted(int(position[node]) for node in touched):
        if found and place < found[-1][1]:
            continue
        low = _narrow(beside, place - 1, -1) + 1  # behind what runs before the interval
        high = _narrow(beside, place, 1) + 1
        if found and low - found[-1][1] < WIDEST:
            low, _ = found.pop()
        found.append((low, high))
    return found


@numba.njit(cache=True)
def _narrow(beside: Int64s, at: int, step: int) -> int:
    """Return the narrowest position on the way from ``at``; the end of the order counts as narrow."""
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
    evaluator: Evaluator, flags: Int8s, touched: Collection[int], *, steps: Steps | None = None, most: int = MOST
) -> Int32s:
    """Reschedule the intervals around touched nodes; the peak never exceeds that of the evaluator's order."""
    if not len(touched):
        return evaluator.order
    problem = evaluator.problem
    steps = Steps(problem, evaluator.step) if steps is None else steps
    before, _ = evaluator.quick(flags)
    found = intervals(steps.narrowness, evaluator.order, touched)
    stretches = [each for low, high in found for each in cuts(steps.narrowness, evaluator.order, low, high)]
    order = improved(steps, evaluator.order, stretches, lives_of(evaluator), most)
    if np.array_equal(order, evaluator.order):
        return evaluator.order
    after, _ = Evaluator(problem, order, evaluator.step).quick(flags)
    return order if after <= before else evaluator.order


def survivors(old: Compiled, order: Int32s, new: Compiled) -> Int64s:
    """Return [v] the position of each node of the new graph in the old order; -1 for a new node."""
    place = {node_name(old.nodes[node]): at for at, node in enumerate(order.tolist())}
    return np.array([place.get(node_name(group), -1) for group in new.nodes], dtype=np.int64)


def node_name(group: Group) -> tuple[object, ...]:
    """Return the identity of a node, unique in a graph and unchanged by rewrites of other nodes."""
    return tuple(_op_name(op) for op in group)


def _op_name(op: Op) -> tuple[object, ...]:
    if op.body is None:
        return op.target, op.made(), op.inputs()
    inside = tuple((each.origin, _op_name(each)) for each in op.body.graph.ops)
    return op.target, op.made(), op.inputs(), op.body.parts, inside


def rescheduled(
    problem: Problem, rank: Int64s, flags: Int8s | None = None, *, step: NodeStep | None = None, most: int = MOST
) -> tuple[Int32s, Int32s]:
    """Schedule a rewritten step; return the better splice (of old positions ``rank``), and that order rescheduled."""
    steps = Steps(problem, step)
    flags = np.full(problem.n_storages, KEEP, dtype=np.int8) if flags is None else flags
    judges = [Evaluator(problem, splice(steps, rank, early=early), steps.step) for early in (False, True)]
    judge = min(judges, key=lambda each: each.quick(flags)[0])
    new = np.flatnonzero(rank < 0).tolist()
    after = steps.needs.turned(len(rank))
    touched = {*new, *(int(other) for node in new for other in (*steps.needs(node), *after(node)))}
    return judge.order, incremental_order(judge, flags, touched, steps=steps, most=most)


# Full scheduling (paper, Algorithm 2): the whole step cut at narrow waists, every part in its best order.
# A part of more than ``dynamic.WIDEST`` nodes is cut where it is narrowest, and once more around those cuts.


def full_order(problem: Problem, *, step: NodeStep | None = None, most: int = MOST) -> Int32s:
    """Return a legal order with a low peak, without recomputation; its peak is at most that of program order."""
    steps = Steps(problem, step)
    program = np.arange(problem.n_nodes, dtype=np.int32)
    order = in_parts(steps.needs, steps.waists, program)
    stretches = cuts(steps.narrowness, order, 0, len(order))
    seams = list(forced(steps.narrowness, order, stretches, NARROW))
    order = improved(steps, order, stretches, most=most)
    around = [(max(0, seam - WIDEST // 2), min(len(order), seam + WIDEST // 2)) for seam in seams]
    order = improved(steps, order, around, most=most)
    judge = Evaluator(problem, program, steps.step)
    flags = np.full(problem.n_storages, KEEP, dtype=np.int8)
    before, _ = judge.quick(flags)
    after, _ = Evaluator(problem, order, judge.step).quick(flags)
    return order if after < before else program
