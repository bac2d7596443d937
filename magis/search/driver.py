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

from magis.errors import UsageError, VerifyError
from magis.search.budgeted_evaluator import (
    DEFAULT_BUDGET,
    BudgetedEvaluator,
    JudgedPlan,
    Objective,
    Over,
    SearchOver,
    never,
)
from magis.search.local_search import anneal, best_first
from magis.search.moves import climb, reordered
from magis.search.proposals import Proposer, distinct
from magis.simulate.evaluator import lower_bound
from magis.simulate.problem import DROP, Int8s, Int32s, Problem

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
    over: Over = never,
) -> SearchResult:
    """The fastest plan within a memory limit (bytes), or the leanest within a latency limit (ns).

    Where the limit cannot be kept, the plan that exceeds it least. A ``brief`` search makes a tenth of the proposals:
    good enough to tell promising problems from others. However little time ``seconds`` and ``over`` leave, the step
    as it stands is judged. UsageError unless exactly one limit is given.
    """
    if (memory_limit is None) == (latency_limit_ns is None):
        raise UsageError("a search needs a memory limit or a latency limit, and not both")
    if budget < 1:
        raise UsageError(f"a search needs a budget of at least 1 state, not {budget}")
    goal = Objective(memory_limit, latency_limit_ns)
    judge = BudgetedEvaluator(problem, goal, budget, seconds, over=over)
    allow_swap = allow_swap and problem.xfer_ns_per_byte > 0.0
    with contextlib.suppress(SearchOver):
        _Search(judge, allow_swap=allow_swap, seed=seed, brief=brief).run()
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
        lower_bound=lower_bound(problem),
    )


class _Search:
    """The stages of one search; every stage ends early by SearchOver when the budget does."""

    def __init__(self, judge: BudgetedEvaluator, *, allow_swap: bool, seed: int, brief: bool) -> None:
        self.judge = judge
        self.brief = brief
        self.goal = judge.goal
        self.allow_swap = allow_swap
        self.seed = seed
        self.make = Proposer(judge, allow_swap=allow_swap, brief=brief)
        self.untouched = np.full(judge.problem.n_storages, DROP, dtype=np.int8)

    def run(self) -> None:
        """All stages."""
        judge, goal = self.judge, self.goal
        base = judge.plan(self.untouched)
        if goal.memory_limit is not None and base.met(goal):
            return  # nothing to pay for
        orders = [base.order]
        base = reordered(judge, base)
        if not np.array_equal(base.order, orders[0]):  # best without recomputation, not always with it
            orders.append(base.order)
        plans: list[JudgedPlan] = []
        for order in orders:
            if goal.memory_limit is not None:
                plans += self.make.mix(self.make.propose(order, goal.memory_limit, thorough=not self.brief), goal)
                plans += [] if self.brief else self.approach(order, goal.memory_limit)
            else:
                judge.use(order)
                plans += self.make.mix(self.bisect(judge.plan(self.untouched)), goal)
                plans += self.squeeze(order)
        plans = distinct(plans, goal)
        for polish in range(POLISHES):
            before = judge.states
            share = FIRST_POLISH << polish  # not a share of the budget: with more of it no search ends worse
            best_first(judge, goal, [*self.best(plans), *plans[:8]], share, allow_swap=self.allow_swap)
            best = self.best(plans)[0]
            anneal(judge, goal, best, share, seed=self.seed + polish, allow_swap=self.allow_swap)
            self.climb_best()
            if judge.states == before:
                return  # nothing is left to try

    def best(self, plans: list[JudgedPlan]) -> list[JudgedPlan]:
        """The best plan so far, first of a list."""
        return [self.judge.best] if self.judge.best is not None else plans[:1]

    def climb_best(self) -> None:
        best = self.judge.best
        if best is not None:
            self.judge.use(best.order)
            climb(self.judge, self.goal, best, allow_swap=self.allow_swap)

    def approach(self, order: Int32s, limit: int) -> list[JudgedPlan]:
        """Plans for limits between one that is not kept and the lowest peak reached.

        Far below what can be reached all prices rise without end, and nothing useful is proposed.
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
        """Latency mode: plans at ever closer memory limits around the lowest that the latency limit allows."""
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
        """Latency mode: memory limits just below the lowest peak, as long as they can be kept in time."""
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
