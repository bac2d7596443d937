"""The search: from a step and a limit to the best plan found, by best-first search (paper, Algorithm 3) and annealing.

Minimum cuts propose plans near the limit, with several sets of checkpoints; memory below the limit is used to undo
recomputation; fast plans are mixed with small ones; best-first search and annealing polish the best. Operators in
windows around the peak are reordered before and in between. Equal budgets and seeds give equal results, and a smaller
budget evaluates a prefix of a larger one's states.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from magis.errors import VerifyError
from magis.search.alike import CLIMB, SHAKE, alike_moves
from magis.search.budgeted_evaluator import (
    DEFAULT_BUDGET,
    LARGE,
    BudgetedEvaluator,
    JudgedPlan,
    Objective,
    Over,
    SearchOver,
    Watch,
    affordable,
    check_request,
    never,
)
from magis.search.moves import (
    alternatives,
    climb,
    frugal_order,
    giving_back,
    hot,
    reordered,
    repeating,
    saving,
    with_makers,
    worth_repeating,
)
from magis.search.pareto_sweep import Proposer, distinct
from magis.search.window import window_orders
from magis.simulate.evaluator import lower_bound
from magis.simulate.problem import KEEP, REPEAT, SWAP, Int8s, Int32s, Int64s, Problem

# Best-first search over plans (paper, Algorithm 3), and threshold annealing on flags. The children of a popped plan are
# moves, scored cheaply (bytes per ns) and evaluated best first, up to a number. A child enters the queue unless it is
# worse than the best plan by more than a tenth. We depart from the paper in that a child is two array elements changed,
# not a graph rewritten and scheduled again, and that states come from minimum cuts, not from the original graph alone.

CHILDREN = 12  # evaluated per popped plan and kind of move
RELAXED_NUM, RELAXED_DEN = 11, 10


def best_first(
    judge: BudgetedEvaluator, goal: Objective, starts: Sequence[JudgedPlan], states: int, *, allow_swap: bool
) -> None:
    """Search from ``starts`` for ``states`` new states, or until the queue is empty; ``judge`` keeps the best."""
    stop = judge.states + states
    queue: list[tuple[tuple[int, int], int, JudgedPlan]] = []
    pushed: set[tuple[bytes, bytes]] = set()

    def push(plan: JudgedPlan) -> None:
        digest = (plan.order.tobytes(), plan.flags.tobytes())
        if digest not in pushed:
            pushed.add(digest)
            heapq.heappush(queue, (plan.key(goal), len(pushed), plan))

    for plan in starts:
        push(plan)
    while queue and judge.states < stop:
        _, _, plan = heapq.heappop(queue)
        for child in _children(judge, goal, plan, allow_swap=allow_swap):
            best = judge.best
            if best is None:
                raise SearchOver  # cannot be: a child has been judged
            limit = best.key(goal)
            key = child.key(goal)
            if all(mine * RELAXED_DEN <= RELAXED_NUM * its for mine, its in zip(key, limit, strict=True)):
                push(child)
            if judge.states >= stop:
                return


def _children(judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan, *, allow_swap: bool) -> Iterator[JudgedPlan]:
    """Yield evaluated neighbours of a plan: less memory at the peak, storages kept again, or a reordered window."""
    judge.use(plan.order)
    judge.look(plan.flags)
    evaluator = judge.evaluator
    moves = saving(evaluator, plan.flags, CHILDREN, allow_swap=allow_swap)
    moves += [(storage, KEEP) for storage in giving_back(evaluator, plan.flags)[:CHILDREN]]
    leads = judge.best is None or plan.key(goal) <= judge.best.key(goal)
    orders = list(window_orders(evaluator)) if leads else []  # slower to evaluate than a move, and seldom better
    again = repeating(evaluator, plan.flags, CHILDREN) if worth_repeating(goal, plan) else []
    changes = [([storage], flag) for storage, flag in moves]
    changes += [(with_makers(evaluator, plan.flags, storage), REPEAT) for storage in again]
    for storages, flag in changes:
        flags = plan.flags.copy()
        flags[storages] = flag
        yield JudgedPlan(plan.order, flags, *judge.cost(flags))
    for order in orders:
        judge.use(order)
        child = judge.plan(plan.flags)
        if child.key(goal) < plan.key(goal):  # only better orders
            yield child
    judge.use(plan.order)


# Threshold annealing with the exact evaluator. Half of the steps exchange a storage in memory at the peak for one
# that the plan recomputes or swaps: two random storages seldom affect the peak.

EXCHANGES, AT_PEAK, BACK = 0.5, 0.6, 0.7  # cumulative probabilities: exchange, remove, keep again; else any move
PAIRS = 0.6  # share of the other steps that change two storages at once

STALE = 300  # consecutive steps without a new plan after which annealing ends


def anneal(
    judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan, states: int, *, seed: int, allow_swap: bool
) -> None:
    """Search by threshold annealing from a plan for ``states`` new states; ``judge`` keeps the best plan.

    The walk may exceed the limit, at a price; it accepts plans that are worse by less than a threshold that falls to 0.
    Integers and one seeded generator make it deterministic.
    """
    judge.use(plan.order)
    evaluator = judge.evaluator
    nbytes: Int64s = judge.problem.nbytes
    worthwhile = nbytes * 1000 >= nbytes.max(initial=0)
    movable = np.flatnonzero((evaluator.step.redoable | evaluator.step.swappable) & worthwhile)
    options = {storage: alternatives(evaluator, storage, -1, allow_swap=allow_swap) for storage in movable.tolist()}
    if worth_repeating(goal, plan):
        for storage in movable[evaluator.step.redoable[movable]].tolist():
            options[storage].append(REPEAT)
    choices = np.array([storage for storage, flags in options.items() if len(flags) > 1], dtype=np.int64)
    if not len(choices):
        return
    price = _Price(judge, goal, plan)
    random = np.random.Generator(np.random.PCG64(seed))
    flags = plan.flags.copy()
    value = price.value(*judge.look(flags))
    present, away = _present_and_away(judge, flags, choices)
    start, stop = judge.states, judge.states + states
    stale = 0
    while judge.states < stop and stale < STALE:
        known = judge.states
        threshold = price.step * (stop - judge.states) // (stop - start)
        before: list[tuple[int, int]] = []
        pools = _pools(random.random(), present, away)
        for pool, back in pools or [(choices, False)] * (2 if random.random() < PAIRS else 1):
            storage = int(pool[int(random.integers(len(pool)))])
            others = [KEEP] if back else [flag for flag in options[storage] if flag != flags[storage]]
            flag = others[int(random.integers(len(others)))]
            for each in with_makers(evaluator, flags, storage) if flag == REPEAT else [storage]:
                before.append((each, int(flags[each])))
                flags[each] = flag
        found = price.value(*judge.cost(flags))
        new = judge.states > known
        stale = 0 if new else stale + 1
        if found <= value + threshold:
            value = found
            if not new:
                judge.look(flags)
            present, away = _present_and_away(judge, flags, choices)
        else:
            for storage, flag in reversed(before):
                flags[storage] = flag


def _present_and_away(judge: BudgetedEvaluator, flags: Int8s, choices: Int64s) -> tuple[Int64s, Int64s]:
    """Return the choices in memory at the peak of the plan evaluated last, and those that are recomputed or swapped."""
    evaluator = judge.evaluator
    away = (evaluator.recomputed() | ((flags == SWAP) & evaluator.step.swappable)) & (flags != KEEP)
    return choices[hot(evaluator)[choices]], choices[away[choices]]


def _pools(draw: float, present: Int64s, away: Int64s) -> list[tuple[Int64s, bool]]:
    """Choose the pools for an annealing step, each with True if its storages are kept again; empty: any storage."""
    if draw >= BACK or (draw >= AT_PEAK and not len(away)) or (draw < AT_PEAK and not len(present)):
        return []
    if draw >= AT_PEAK:
        return [(away, True)]
    return [(present, False), (away, True)] if draw < EXCHANGES and len(away) else [(present, False)]


class _Price:
    """Scalar cost of a plan: the quantity that the goal minimizes, plus the priced excess over the limit.

    For a start within the limit, the price is twice the mean price of its savings. Otherwise the excess dominates: a
    64th of the whole peak (or latency) costs as much as the whole latency (or peak).
    """

    def __init__(self, judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan) -> None:
        problem = judge.problem
        latency = max(1, problem.least_ns)
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


MOST_THOROUGH = 2 * LARGE
"""Most nodes for which all series of proposals are made; on larger steps they would use up the budget."""
BISECTIONS = 10
APPROACHES = 3
SQUEEZES = 4
FIRST_POLISH = 1000  # states of best-first search, and of annealing, in the first polish; twice as many in the next
POLISHES = 10
FROM_NOTHING = 10_000
"""States of the first part of a search, without a starting plan, if the rest starts from the plans of a front."""


@dataclass(frozen=True, eq=False)
class SearchResult(JudgedPlan):
    """The best plan found, and statistics of the search."""

    states: int
    """Number of different plans evaluated."""
    stopped_by_seconds: bool
    """True if a time limit ended the search: the result depends on the machine's speed."""
    feasible: bool
    """True if the plan keeps the limit."""
    judge: BudgetedEvaluator
    """Evaluator with every evaluated plan."""


def search(
    problem: Problem,
    goal: Objective,
    *,
    budget: int = DEFAULT_BUDGET,
    allow_swap: bool = True,
    seed: int = 0,
    brief: bool = False,
    over: Over = never,
    watch: Watch | None = None,
    starts: Sequence[JudgedPlan] = (),
) -> SearchResult:
    """Find the fastest plan within a memory limit (bytes), or the one with the lowest peak within a latency limit (ns).

    If no plan keeps the limit, returns the one that exceeds it least. A ``brief`` search makes a tenth of the
    proposals, enough to rank problems. With ``starts``, plans of this problem, it proposes none: it mixes and polishes
    these, and the result is no worse. On large steps fewer plans than ``budget`` are evaluated (`affordable`). The step
    in program order is always evaluated, whatever ``over`` returns. ``watch`` is called with every evaluated plan.
    Raises UsageError unless exactly one limit is given.
    """
    check_request(goal, budget)
    judge = BudgetedEvaluator(problem, goal, affordable(budget, problem.n_nodes), over=over, watch=watch)
    allow_swap = allow_swap and problem.xfer_ns_per_byte > 0.0
    with contextlib.suppress(SearchOver):
        _Search(judge, budget, allow_swap=allow_swap, seed=seed, brief=brief, starts=starts).run()
    best = judge.best
    if best is None:
        raise VerifyError("a search judged no plan")
    return SearchResult(
        order=best.order.copy(),
        flags=best.flags,
        peak=best.peak,
        latency_ns=best.latency_ns,
        states=judge.states,
        stopped_by_seconds=judge.stopped_by_seconds,
        feasible=best.met(goal),
        judge=judge,
    )


class _Search:
    """Stages of one search; every stage raises SearchOver when the budget is spent."""

    def __init__(
        self, judge: BudgetedEvaluator, most: int, *,
        allow_swap: bool, seed: int, brief: bool, starts: Sequence[JudgedPlan],
    ) -> None:  # fmt: skip
        self.judge, self.most = judge, most
        self.starts = starts
        self.brief = brief
        self.goal = judge.goal
        self.allow_swap = allow_swap
        self.seed = seed
        self.thorough = not brief and judge.problem.n_nodes <= MOST_THOROUGH
        self.make = Proposer(judge, allow_swap=allow_swap, brief=brief)

    def run(self) -> None:
        """Run all stages."""
        judge, goal = self.judge, self.goal
        base = judge.plan(judge.untouched)
        if goal.memory_limit is not None and base.met(goal):
            return  # no recomputation is needed
        alike = self.climbed_alike(base)
        others = self.make.mix(self.judged_starts(), goal) if self.starts else self.proposals(base)
        plans = distinct(others + alike, goal)
        for polish in range(POLISHES):
            before = judge.states
            share = FIRST_POLISH << polish  # independent of the budget: more of it never gives a worse result
            best_first(judge, goal, [*self.best(plans), *plans[:8]], share, allow_swap=self.allow_swap)
            best = self.best(plans)[0]
            anneal(judge, goal, best, share, seed=self.seed + polish, allow_swap=self.allow_swap)
            if judge.best is not None:
                judge.use(judge.best.order)
                climb(judge, goal, judge.best, allow_swap=self.allow_swap)
            if polish == 0:
                plans = distinct(self.frugal(base) + plans, goal)
            if judge.states == before:
                return  # nothing is left to try

    def proposals(self, base: JudgedPlan) -> list[JudgedPlan]:
        """Propose plans without a starting plan, in program order and in an order with a lower peak."""
        judge, goal = self.judge, self.goal
        orders = [base.order]
        base = reordered(judge, base)
        if not np.array_equal(base.order, orders[0]):  # it is better without recomputation, not always with it
            orders.append(base.order)
        plans: list[JudgedPlan] = []
        for order in orders:
            if goal.memory_limit is not None:
                plans += self.make.mix(self.make.propose(order, goal.memory_limit, thorough=self.thorough), goal)
                plans += [] if self.brief else self.approach(order, goal.memory_limit)
            else:
                judge.use(order)
                plans += self.make.mix(self.bisect(judge.plan(judge.untouched)), goal)
                plans += self.squeeze(order)
        return plans

    def frugal(self, base: JudgedPlan) -> list[JudgedPlan]:
        """Propose plans in the frugal order, and the one that keeps nothing there, if none so far keeps the limit."""
        judge, goal, best, limit = self.judge, self.goal, self.judge.best, self.goal.memory_limit
        if limit is None or not self.thorough or not best or best.met(goal) or not worth_repeating(goal, best):
            return []
        order = frugal_order(judge.problem, base.order)
        plans = self.make.mix(self.make.propose(order, limit, thorough=True), goal) + self.approach(order, limit)
        judge.use(order)
        bare = judge.plan(np.where(judge.evaluator.step.redoable, REPEAT, judge.untouched).astype(np.int8))
        return [*plans, climb(judge, goal, bare, allow_swap=self.allow_swap)]

    def climbed_alike(self, base: JudgedPlan) -> list[JudgedPlan]:
        """Return the plan that moves of storages alike lead to from the best start; none if the network is not deep."""
        judge, goal = self.judge, self.goal
        if self.brief or (self.starts and goal.memory_limit is not None):
            return []  # plans of a front, from which a search within a memory limit starts, come from such moves
        if (alike := alike_moves(judge, allow_swap=self.allow_swap)) is None:
            return []
        judge.budget = min(self.most, judge.budget + CLIMB + SHAKE)
        start, most = [*self.judged_starts(), base][0], judge.budget // 3
        found = alike.climb(goal, start, min(CLIMB, most))
        return [found if goal.memory_limit is not None else alike.shake(goal, found, min(SHAKE, most), self.seed)]

    def judged_starts(self) -> list[JudgedPlan]:
        """Evaluate the starting plans; return them on the order of the best one, best first."""
        judge = self.judge
        for start in self.starts:
            judge.use(start.order)
            judge.cost(start.flags)
        if self.starts:
            judge.use(self.best([])[0].order)
        return distinct([judge.plan(start.flags) for start in self.starts], self.goal)

    def best(self, plans: list[JudgedPlan]) -> list[JudgedPlan]:
        """Return a list with the best plan so far, or with the first of ``plans`` if none is evaluated."""
        return [self.judge.best] if self.judge.best is not None else plans[:1]

    def approach(self, order: Int32s, limit: int) -> list[JudgedPlan]:
        """Propose plans for limits between an infeasible one and the lowest peak found.

        Directly for a limit far below, all prices would grow without bound and no proposal would be useful.
        """
        plans: list[JudgedPlan] = []
        for _ in range(APPROACHES):
            best = self.judge.best
            if best is None or best.peak <= limit:
                break
            target = best.peak - (best.peak - limit) // 4
            plans += self.make.mix(self.make.propose(order, target, thorough=True), self.goal)
        return plans

    def bisect(self, base: JudgedPlan) -> list[JudgedPlan]:
        """Propose plans for memory limits that bisect towards the lowest one within the latency limit."""
        judge, goal = self.judge, self.goal
        low, high = lower_bound(judge.problem), base.peak
        plans = [base]
        for _ in range(BISECTIONS):
            if high - low <= base.peak // 1000:
                break
            limit = (low + high) // 2
            found = self.make.propose(base.order, limit, thorough=False)
            tight = Objective(memory_limit=limit)
            found = [climb(judge, tight, plan, allow_swap=self.allow_swap) for plan in found[:2]] + found[2:]
            plans += found
            if min(plan.key(tight) for plan in found) <= (limit, goal.latency_limit_ns or 0):
                high = limit
            else:
                low = limit
        return distinct(plans, goal)

    def squeeze(self, order: Int32s) -> list[JudgedPlan]:
        """Propose plans for memory limits just below the lowest peak, as long as the latency limit is kept."""
        plans: list[JudgedPlan] = []
        for _ in range(SQUEEZES):
            best = self.judge.best
            if best is None or not best.met(self.goal):
                break
            limit = best.peak - max(1, (best.peak - self.judge.problem.persistent_bytes) // 100)
            plans += self.make.mix(self.make.propose(order, limit, thorough=True), Objective(memory_limit=limit))
            if self.judge.best is best:
                break
        return plans
