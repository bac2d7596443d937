"""Plans for a memory limit, proposed on one order: from minimum cuts, with checkpoints at several distances.

Cheap proposals and lean ones are mixed; what room they leave is given back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective
from magis.search.lagrangian_min_cut import LagrangianMinCut, checkpoints, follow_prices, turning_point
from magis.search.moves import climb, relink
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, Bools, Int8s, Int32s

NO_SWAPS = -1.0
LINK_PRICES = (0.02, 0.1, 0.4, 1.5)  # ns of recomputation that a ns of the link is worth
ROUNDS = 48  # of prices per series of proposals
BRIEF_ROUNDS = 16
SERIES = ((0.0, True, True), (0.3, True, False), (-0.7, True, True), (0.0, False, False))
"""Series of proposals, as ``follow_prices`` has them: tilt of the prices, whether to learn, sharp beginning."""


@dataclass(frozen=True, eq=False)
class Proposer:
    """Makes plans that a judge judges."""

    judge: BudgetedEvaluator
    allow_swap: bool
    brief: bool
    """A tenth of the proposals."""

    def propose(self, order: Int32s, limit: int, *, thorough: bool) -> list[JudgedPlan]:
        """Plans for a memory limit on one order, distinct in what they cost, best first."""
        judge = self.judge
        judge.use(order)
        model = LagrangianMinCut(judge.evaluator)
        sets: list[Bools | None] = [None, *checkpoints(judge.evaluator)]
        if not thorough:
            sets = sets[:: max(1, len(sets) // 4)]
        rounds = BRIEF_ROUNDS if self.brief else ROUNDS if thorough else ROUNDS // 2
        plans: list[JudgedPlan] = []

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
        return distinct(plans, Objective(memory_limit=limit))

    def all_but(self, kept: Bools) -> list[Int8s]:
        """Make everything again except checkpoints: for the way back alone, and wherever something lies idle."""
        gaps, turn = self.judge.evaluator.gaps, turning_point(self.judge.evaluator)
        plans = []
        for idle in ((gaps.start < turn) & (turn < gaps.end), gaps.start >= 0):
            flags = np.where(idle, RECOMPUTE, DROP).astype(np.int8)
            flags[kept] = KEEP
            plans.append(flags)
        return plans

    def mix(self, plans: list[JudgedPlan], goal: Objective) -> list[JudgedPlan]:
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
        found = distinct([*climbed, *(plan for plan in mixed if plan is not None)], goal)
        return [climb(judge, goal, plan, allow_swap=self.allow_swap) for plan in found[:4]] + found[4:]


def distinct(plans: list[JudgedPlan], goal: Objective) -> list[JudgedPlan]:
    """One plan per pair of costs, sorted by the goal's key."""
    unique: dict[tuple[int, int], JudgedPlan] = {}
    for plan in plans:
        unique.setdefault((plan.peak, plan.latency_ns), plan)
    return sorted(unique.values(), key=lambda plan: plan.key(goal))
