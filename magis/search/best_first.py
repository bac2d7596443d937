"""Best-first search over plans (paper, Algorithm 3), with lazy children.

A priority queue of plans by the goal's key. A popped plan has its children generated as moves, which are scored
cheaply (bytes per nanosecond) and evaluated best first, only so many of them. A child enters the queue if it is not
worse than the best plan by more than a tenth. Plans seen before cost nothing. We depart from the paper in that a
child is two array elements changed, not a graph rewritten and scheduled again, and that states come from minimum
cuts, not from the original graph alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from magis.schedule.window import window_orders
from magis.search.judge import Goal, Judge, Plan, SearchOver
from magis.search.moves import giving_back, saving
from magis.simulate.events import KEEP

__all__ = ["best_first"]

CHILDREN = 12  # evaluated per popped plan and kind of move
RELAXED_NUM, RELAXED_DEN = 11, 10


def best_first(judge: Judge, goal: Goal, starts: Sequence[Plan], states: int, *, allow_swap: bool) -> None:
    """Search from some plans until so many new states are evaluated or none is left; the judge keeps the best."""
    stop = judge.states + states
    queue: list[tuple[tuple[int, int], int, Plan]] = []
    pushed: set[tuple[bytes, bytes]] = set()
    for plan in starts:
        _push(queue, pushed, goal, plan)
    while queue and judge.states < stop:
        _, _, plan = heapq.heappop(queue)
        for child in _children(judge, goal, plan, allow_swap=allow_swap):
            best = judge.best
            if best is None:
                raise SearchOver  # cannot be: a child has been judged
            limit = best.key(goal)
            key = child.key(goal)
            if all(mine * RELAXED_DEN <= RELAXED_NUM * its for mine, its in zip(key, limit, strict=True)):
                _push(queue, pushed, goal, child)
            if judge.states >= stop:
                return


def _push(
    queue: list[tuple[tuple[int, int], int, Plan]], pushed: set[tuple[bytes, bytes]], goal: Goal, plan: Plan
) -> None:
    digest = (plan.order.tobytes(), plan.flags.tobytes())
    if digest not in pushed:
        pushed.add(digest)
        heapq.heappush(queue, (plan.key(goal), len(pushed), plan))


def _children(judge: Judge, goal: Goal, plan: Plan, *, allow_swap: bool) -> Iterator[Plan]:
    """Judged neighbours: saving at the peak, giving back, another order of a window around the peak."""
    judge.use(plan.order)
    judge.look(plan.flags)
    evaluator = judge.evaluator
    moves = saving(evaluator, plan.flags, CHILDREN, allow_swap=allow_swap)
    moves += [(storage, KEEP) for storage in giving_back(evaluator, plan.flags)[:CHILDREN]]
    leads = judge.best is None or plan.key(goal) <= judge.best.key(goal)
    orders = list(window_orders(evaluator)) if leads else []  # dearer than a move, and seldom better
    for storage, flag in moves:
        flags = plan.flags.copy()
        flags[storage] = flag
        yield Plan(plan.order, flags, *judge.cost(flags))
    for order in orders:
        judge.use(order)
        child = judge.plan(plan.flags)
        if child.key(goal) < plan.key(goal):  # never a worse order
            yield child
    judge.use(plan.order)
