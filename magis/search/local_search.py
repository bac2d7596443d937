"""Best-first search over plans (paper, Algorithm 3), and threshold annealing on flags.

A priority queue of plans by the goal's key. A popped plan has its children generated as moves, which are scored
cheaply (bytes per nanosecond) and evaluated best first, only so many of them. A child enters the queue if it is not
worse than the best plan by more than a tenth. Plans seen before cost nothing. We depart from the paper in that a
child is two array elements changed, not a graph rewritten and scheduled again, and that states come from minimum
cuts, not from the original graph alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from magis.schedule.window import window_orders
from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective, SearchOver
from magis.search.moves import alternatives, giving_back, saving
from magis.simulate.problem import KEEP, Int64s

CHILDREN = 12  # evaluated per popped plan and kind of move
RELAXED_NUM, RELAXED_DEN = 11, 10


def best_first(
    judge: BudgetedEvaluator, goal: Objective, starts: Sequence[JudgedPlan], states: int, *, allow_swap: bool
) -> None:
    """Search from some plans until so many new states are evaluated or none is left; the judge keeps the best."""
    stop = judge.states + states
    queue: list[tuple[tuple[int, int], int, JudgedPlan]] = []
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
    queue: list[tuple[tuple[int, int], int, JudgedPlan]],
    pushed: set[tuple[bytes, bytes]],
    goal: Objective,
    plan: JudgedPlan,
) -> None:
    digest = (plan.order.tobytes(), plan.flags.tobytes())
    if digest not in pushed:
        pushed.add(digest)
        heapq.heappush(queue, (plan.key(goal), len(pushed), plan))


def _children(judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan, *, allow_swap: bool) -> Iterator[JudgedPlan]:
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
        yield JudgedPlan(plan.order, flags, *judge.cost(flags))
    for order in orders:
        judge.use(order)
        child = judge.plan(plan.flags)
        if child.key(goal) < plan.key(goal):  # never a worse order
            yield child
    judge.use(plan.order)


# Threshold annealing on single flags and pairs of flags, with the exact evaluator.

PAIRS = 0.6  # share of steps that change two storages at once: one leaves, one returns

STALE = 300  # steps in a row that met only plans seen before: the neighbourhood is used up


def anneal(
    judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan, states: int, *, seed: int, allow_swap: bool
) -> None:
    """Walk from a plan for so many new states; the judge keeps the best.

    The walk may break the limit, at a price; it accepts what is worse by less than a threshold that sinks to
    nothing. Integers and one seeded generator, so it repeats.
    """
    judge.use(plan.order)
    evaluator = judge.evaluator
    movable = np.flatnonzero((evaluator.step.redoable | evaluator.step.swappable) & _worth_moving(judge))
    options = {storage: alternatives(evaluator, storage, -1, allow_swap=allow_swap) for storage in movable.tolist()}
    choices = [storage for storage, flags in options.items() if len(flags) > 1]
    if not choices:
        return
    price = _Price(judge, goal, plan)
    random = np.random.Generator(np.random.PCG64(seed))
    flags = plan.flags.copy()
    value = price.value(plan.peak, plan.latency_ns)
    start, stop = judge.states, judge.states + states
    stale = 0
    while judge.states < stop and stale < STALE:
        known = judge.states
        threshold = price.step * (stop - judge.states) // (stop - start)
        before: list[tuple[int, int]] = []
        for _ in range(2 if random.random() < PAIRS else 1):
            storage = choices[int(random.integers(len(choices)))]
            before.append((storage, int(flags[storage])))
            others = [flag for flag in options[storage] if flag != flags[storage]]
            flags[storage] = others[int(random.integers(len(others)))]
        found = price.value(*judge.cost(flags))
        stale = stale + 1 if judge.states == known else 0
        if found <= value + threshold:
            value = found
        else:
            for storage, flag in reversed(before):
                flags[storage] = flag


def _worth_moving(judge: BudgetedEvaluator) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[s] storages of at least a thousandth of what all temporary ones could save together on average."""
    nbytes: Int64s = judge.problem.nbytes
    worth: np.ndarray[tuple[int], np.dtype[np.bool_]] = nbytes * 1000 >= nbytes.max(initial=0)
    return worth


class _Price:
    """One number for a plan: what the goal minimizes, plus the excess over the limit at a price.

    Within the limit the price is twice the mean one of what was saved so far. Above it the excess comes first: an
    excess of a 64th of the whole is as bad as a whole step (or peak) more.
    """

    def __init__(self, judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan) -> None:
        problem = judge.problem
        latency = max(1, int(problem.node_ns.sum() + problem.blk_ns.sum()))
        peak = max(1, plan.peak - problem.persistent_bytes)
        spent = max(plan.latency_ns - latency, latency // 100, 1)
        by_memory = goal.memory_limit is not None
        self._goal = goal
        if plan.met(goal):
            self._num, self._den = (2 * spent, peak) if by_memory else (2 * peak, spent)
            self.step = max(1, (spent if by_memory else peak) // 100)
        else:
            self._num, self._den = (latency, 1 + peak // 64) if by_memory else (peak, 1 + latency // 64)
            self.step = max(1, (latency if by_memory else peak) // 4)

    def value(self, peak: int, latency_ns: int) -> int:
        if self._goal.memory_limit is not None:
            return latency_ns + max(0, peak - self._goal.memory_limit) * self._num // self._den
        return peak + max(0, latency_ns - (self._goal.latency_limit_ns or 0)) * self._num // self._den
