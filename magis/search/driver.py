"""The search: from a step and a limit to the best plan found.

Proposals from minimum cuts on the way to the limit, with checkpoints at several distances; what room they leave is
given back; cheap and lean ones are mixed; the best of them are polished by best-first search and annealing. The
order is improved by windows before and in between. Everything repeats exactly for equal budgets and seeds, and a
smaller budget sees the first states of a larger one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from magis.errors import UsageError
from magis.schedule.window import window_orders
from magis.search.anneal import anneal
from magis.search.best_first import best_first
from magis.search.judge import Goal, Judge, Plan, SearchOver
from magis.search.moves import climb, relink
from magis.search.prices import CutModel, checkpoints, follow_prices, turning_point
from magis.simulate.evaluator import lower_bound
from magis.simulate.events import DROP, KEEP, RECOMPUTE
from magis.simulate.problem import Bools, Int8s, Int32s, Problem

__all__ = ["DEFAULT_BUDGET", "SearchResult", "search"]

DEFAULT_BUDGET = 30_000
"""States evaluated: about 1 s for 500 nodes, 3 s for 1500, 10 s for 4000."""

NO_SWAPS = -1.0
LINK_PRICES = (0.02, 0.1, 0.4, 1.5)  # ns of recomputation that a ns of the link is worth
ROUNDS = 48  # of prices per series of proposals
BRIEF_ROUNDS = 16
SERIES = ((0.0, True, True), (0.3, True, False), (-0.7, True, True), (0.0, False, False))
"""Series of proposals, as ``follow_prices`` has them: tilt of the prices, whether to learn, sharp beginning."""
BISECTIONS = 10
APPROACHES = 3
SQUEEZES = 4
FIRST_POLISH = 1000  # states of best-first search, and of annealing, in the first polish; twice as many in the next
POLISHES = 10


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best plan found, and how."""

    order: Int32s
    flags: Int8s
    peak: int
    """Bytes, persistent ones and workspace included."""
    latency_ns: int
    states: int
    """Different plans evaluated."""
    stopped_by_seconds: bool
    """The seconds cap ended the search: the result depends on the machine's speed."""
    feasible: bool
    """The limit is kept."""
    lower_bound: int
    """Bytes that no plan avoids."""


def search(
    problem: Problem,
    *,
    memory_limit: int | None = None,
    latency_limit_ns: int | None = None,
    budget: int = DEFAULT_BUDGET,
    seconds: float | None = None,
    allow_swap: bool = True,
    seed: int = 0,
    brief: bool = False,
) -> SearchResult:
    """The fastest plan within a memory limit (bytes), or the leanest within a latency limit (ns).

    Where the limit cannot be kept, the plan that exceeds it least. A ``brief`` search makes a tenth of the proposals:
    good enough to tell promising problems from others. UsageError unless exactly one limit is given.
    """
    if (memory_limit is None) == (latency_limit_ns is None):
        raise UsageError("a search needs a memory limit or a latency limit, and not both")
    if budget < 1:
        raise UsageError(f"a search needs a budget of at least 1 state, not {budget}")
    goal = Goal(memory_limit, latency_limit_ns)
    judge = Judge(problem, goal, budget, seconds)
    allow_swap = allow_swap and problem.xfer_ns_per_byte > 0.0
    with contextlib.suppress(SearchOver):
        _Search(judge, allow_swap=allow_swap, seed=seed, brief=brief).run()
    best = judge.best
    if best is None:
        raise UsageError(f"the search was given {seconds} seconds, not enough for a single plan")
    return SearchResult(
        order=best.order.copy(),
        flags=best.flags,
        peak=best.peak,
        latency_ns=best.latency_ns,
        states=judge.states,
        stopped_by_seconds=judge.stopped_by_seconds,
        feasible=best.met(goal),
        lower_bound=lower_bound(problem),
    )


class _Search:
    """The stages of one search; every stage ends early by SearchOver when the budget does."""

    def __init__(self, judge: Judge, *, allow_swap: bool, seed: int, brief: bool) -> None:
        self.judge = judge
        self.brief = brief
        self.goal = judge.goal
        self.allow_swap = allow_swap
        self.seed = seed
        self.untouched = np.full(judge.problem.n_storages, DROP, dtype=np.int8)

    def run(self) -> None:
        """All stages."""
        judge, goal = self.judge, self.goal
        base = judge.plan(self.untouched)
        if goal.memory_limit is not None and base.met(goal):
            return  # nothing to pay for
        orders = [base.order]
        base = self.reorder(base)
        if not np.array_equal(base.order, orders[0]):  # best without recomputation, not always with it
            orders.append(base.order)
        plans: list[Plan] = []
        for order in orders:
            if goal.memory_limit is not None:
                plans += self.mix(self.propose(order, goal.memory_limit, thorough=not self.brief), goal)
                plans += [] if self.brief else self.approach(order, goal.memory_limit)
            else:
                judge.use(order)
                plans += self.mix(self.bisect(judge.plan(self.untouched)), goal)
                plans += self.squeeze(order)
        plans = _distinct(plans, goal)
        for polish in range(POLISHES):
            before = judge.states
            share = FIRST_POLISH << polish  # not a share of the budget: with more of it no search ends worse
            best_first(judge, goal, [*self.best(plans), *plans[:8]], share, allow_swap=self.allow_swap)
            best = self.best(plans)[0]
            anneal(judge, goal, best, share, seed=self.seed + polish, allow_swap=self.allow_swap)
            self.climb_best()
            if judge.states == before:
                return  # nothing is left to try

    def best(self, plans: list[Plan]) -> list[Plan]:
        """The best plan so far, first of a list."""
        return [self.judge.best] if self.judge.best is not None else plans[:1]

    def climb_best(self) -> None:
        best = self.judge.best
        if best is not None:
            self.judge.use(best.order)
            climb(self.judge, self.goal, best, allow_swap=self.allow_swap)

    def reorder(self, plan: Plan) -> Plan:
        """Lower the peak of a plan by windows, as long as one does."""
        judge = self.judge
        better = True
        while better:
            better = False
            judge.use(plan.order)
            judge.look(plan.flags)
            for order in list(window_orders(judge.evaluator)):
                judge.use(order)
                child = judge.plan(plan.flags)
                if child.peak < plan.peak:
                    plan, better = child, True
                    break
        judge.use(plan.order)
        return plan

    def propose(self, order: Int32s, limit: int, *, thorough: bool) -> list[Plan]:
        """Plans for a memory limit on one order, distinct in what they cost, best first."""
        judge = self.judge
        judge.use(order)
        model = CutModel(judge.evaluator)
        sets: list[Bools | None] = [None, *checkpoints(judge.evaluator)]
        if not thorough:
            sets = sets[:: max(1, len(sets) // 4)]
        rounds = BRIEF_ROUNDS if self.brief else ROUNDS if thorough else ROUNDS // 2
        plans: list[Plan] = []

        def follow(kept: Bools | None, series: int, link_price: float) -> None:
            tilt, learning, sharp = SERIES[series]
            plans.extend(
                follow_prices(
                    judge,
                    model,
                    limit,
                    rounds=rounds,
                    link_price=link_price,
                    kept=kept,
                    learning=learning,
                    tilt=tilt,
                    sharp=sharp,
                )
            )

        for kept in sets:
            for series in range(1 if self.brief else len(SERIES) if thorough else 2):
                follow(kept, series, NO_SWAPS)
            if kept is not None:
                plans.extend(judge.plan(flags) for flags in self.all_but(kept))
        for price in LINK_PRICES if self.allow_swap else ():
            for kept in sets[:: max(1, len(sets) // 2)]:
                for series in range(2):
                    follow(kept, series, price)
        return _distinct(plans, Goal(memory_limit=limit))

    def all_but(self, kept: Bools) -> list[Int8s]:
        """Make everything again except checkpoints: for the way back alone, and wherever something lies idle."""
        gaps, turn = self.judge.evaluator.gaps, turning_point(self.judge.evaluator)
        plans = []
        for idle in ((gaps.start < turn) & (turn < gaps.end), gaps.start >= 0):
            flags = np.where(idle, RECOMPUTE, DROP).astype(np.int8)
            flags[kept] = KEEP
            plans.append(flags)
        return plans

    def approach(self, order: Int32s, limit: int) -> list[Plan]:
        """Plans for limits between one that is not kept and the lowest peak reached.

        Far below what can be reached all prices rise without end, and nothing useful is proposed.
        """
        plans: list[Plan] = []
        for _ in range(APPROACHES):
            best = self.judge.best
            if best is None or best.peak <= limit:
                break
            target = best.peak - (best.peak - limit) // 4
            plans += self.mix(self.propose(order, target, thorough=True), self.goal)
        return plans

    def bisect(self, base: Plan) -> list[Plan]:
        """Latency mode: plans at ever closer memory limits around the lowest that the latency limit allows."""
        judge, goal = self.judge, self.goal
        low, high = lower_bound(judge.problem), base.peak
        plans = [base]
        for _ in range(BISECTIONS):
            if high - low <= base.peak // 1000:
                break
            limit = (low + high) // 2
            found = self.propose(base.order, limit, thorough=False)
            tight = Goal(memory_limit=limit)
            found = [climb(judge, tight, plan, allow_swap=self.allow_swap) for plan in found[:2]] + found[2:]
            plans += found
            if min(plan.key(tight) for plan in found) <= (limit, goal.latency_limit_ns or 0):
                high = limit
            else:
                low = limit
        return _distinct(plans, goal)

    def squeeze(self, order: Int32s) -> list[Plan]:
        """Latency mode: memory limits just below the lowest peak, as long as they can be kept in time."""
        plans: list[Plan] = []
        for _ in range(SQUEEZES):
            best = self.judge.best
            if best is None or not best.met(self.goal):
                break
            limit = best.peak - max(1, (best.peak - self.judge.problem.persistent_bytes) // 100)
            plans += self.mix(self.propose(order, limit, thorough=True), Goal(memory_limit=limit))
            if self.judge.best is best:
                break
        return plans

    def mix(self, plans: list[Plan], goal: Goal) -> list[Plan]:
        """Climb from the best plans, all on one order; mix cheap ones above the limit with lean ones below."""
        judge = self.judge
        if not plans:
            return []
        judge.use(plans[0].order)
        climbed = [climb(judge, goal, plan, allow_swap=self.allow_swap) for plan in plans[:6]]
        best = min(plan.key(goal) for plan in climbed)
        lean = [plan for plan in plans if plan.met(goal)][:8]
        cheap = [plan for plan in plans if not plan.met(goal) and plan.key(goal)[1] < best[1]][:8]
        mixed = [relink(judge, goal, over, under) for over in cheap for under in lean]
        found = _distinct([*climbed, *(plan for plan in mixed if plan is not None)], goal)
        return [climb(judge, goal, plan, allow_swap=self.allow_swap) for plan in found[:4]] + found[4:]


def _distinct(plans: list[Plan], goal: Goal) -> list[Plan]:
    """One plan per pair of costs, sorted by the goal's key."""
    unique: dict[tuple[int, int], Plan] = {}
    for plan in plans:
        unique.setdefault((plan.peak, plan.latency_ns), plan)
    return sorted(unique.values(), key=lambda plan: plan.key(goal))
