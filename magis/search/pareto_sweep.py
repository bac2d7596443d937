"""Pareto sweep: minimum cuts propose plans for falling memory limits, and the best are kept.

The limits fall from the peak without recomputation to the lower bound of all plans. Minimum cuts propose plans
(``magis.search.lagrangian_min_cut``); the best are improved by keeping storages again within the limit, and neighbours
on the front are mixed. All evaluated plans count, for whichever limit they were proposed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from magis.search.alike import CLIMB, alike_moves
from magis.search.budgeted_evaluator import (
    BudgetedEvaluator,
    JudgedPlan,
    Objective,
    Over,
    SearchOver,
    Watch,
    affordable,
    never,
)
from magis.search.lagrangian_min_cut import LagrangianMinCut, checkpoints, follow_prices, slide_prices, turning_point
from magis.search.moves import climb, relink, reordered
from magis.simulate.evaluator import lower_bound
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, Bools, Int8s, Int32s, Problem

# Plans for a memory limit, proposed on one order: from minimum cuts, with several sets of checkpoints.
# Fast and small proposals are mixed; storages are kept again as far as the limit allows.

NO_SWAPS = -1.0
LINK_PRICES = (0.02, 0.1, 0.4, 1.5)  # ns of recomputation that 1 ns of link time is worth
ROUNDS = 48  # price updates per series of proposals
BRIEF_ROUNDS = 16
SERIES = ((0.0, True, True), (0.3, True, False), (-0.7, True, True), (0.0, False, False))
"""Series of proposals as arguments of ``follow_prices``: tilt, learning, sharp."""


@dataclass(frozen=True, eq=False)
class Proposer:
    """Source of proposed plans, evaluated by ``judge``."""

    judge: BudgetedEvaluator
    allow_swap: bool
    brief: bool
    """True for a tenth of the proposals."""

    def propose(self, order: Int32s, limit: int, *, thorough: bool) -> list[JudgedPlan]:
        """Propose plans for a memory limit on one order, with distinct costs, best first."""
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
        """Return flags that recompute all but the checkpoints: storages idle from forward to backward, or all idle
        ones."""
        gaps, turn = self.judge.evaluator.gaps, turning_point(self.judge.evaluator)
        plans = []
        for idle in ((gaps.start < turn) & (turn < gaps.end), gaps.start >= 0):
            flags = np.where(idle, RECOMPUTE, DROP).astype(np.int8)
            flags[kept] = KEEP
            plans.append(flags)
        return plans

    def mix(self, plans: list[JudgedPlan], goal: Objective) -> list[JudgedPlan]:
        """Improve the best plans, all on one order, by hill climbing; mix fast ones above the limit with small ones."""
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
    """Return one plan per pair of costs, sorted by the goal's key."""
    unique: dict[tuple[int, int], JudgedPlan] = {}
    for plan in plans:
        unique.setdefault((plan.peak, plan.latency_ns), plan)
    return sorted(unique.values(), key=lambda plan: plan.key(goal))


@dataclass(frozen=True)
class Effort:
    """Settings for how thorough a sweep is."""

    levels: int = 16
    """Number of memory limits."""
    rounds: int = 6
    """Price updates per limit."""
    sets: int = 5
    """Approximate number of checkpoint sets: every k-th of all is used."""
    link_prices: tuple[float, ...] = (0.02, 0.1, 0.4, 1.5)
    """Nanoseconds of recomputation that a nanosecond of link time is worth, if the device can swap."""
    polished: int = 64
    """Plans of the front whose neighbours are evaluated."""
    mixed: int = 64
    """Plans of the front whose mixtures are evaluated."""
    approaches: tuple[int, ...] = (16, 8, 4)
    """Attempts below the lowest peak, each by 1/n of its distance to the lower bound."""
    states: int = 60_000
    """Most states, fewer for large steps: memory use of a sweep grows with them."""
    reorder: bool = True
    """True if operators may run in another order than the program's."""
    recompute: bool = True
    """True if tensors may be recomputed."""
    swap: bool = True
    """True if tensors may be swapped, where the device has a link."""
    watch: Watch | None = None
    """Callback for every evaluated plan."""
    stretches: tuple[float, ...] = ()
    """Latencies, as multiples of the least one, within which storages alike are moved together in a deep network."""


MIXTURES = ((1, 4), (3, 4), (8, 8))
"""Distance of two mixed plans on the front, and number of intervals between their peaks."""
FULL = Effort(stretches=(1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5))
BRIEF = Effort(
    levels=10, sets=3, link_prices=(0.1,), polished=5, mixed=5, approaches=(6,), states=15_000,
    stretches=(1.05, 1.15, 1.4),
)  # fmt: skip
"""Effort for the step around a loop."""
BODY = Effort(levels=10, sets=3, link_prices=(0.1,), polished=5, mixed=5, approaches=(), states=15_000)
"""Effort for the body of a loop, whose lowest peaks are seldom useful."""


class Costed(Protocol):
    """Protocol of objects with a peak (bytes) and a latency (ns)."""

    @property
    def peak(self) -> int: ...

    @property
    def latency_ns(self) -> int: ...


C = TypeVar("C", bound=Costed)


@dataclass(frozen=True, eq=False)
class Front(Generic[C]):
    """Plans, or records of plans, by increasing peak and decreasing latency, and the number of states evaluated."""

    points: tuple[C, ...]
    states: int
    stopped_by_seconds: bool = False
    """True if a time limit ended the search."""


def pareto(every: Iterable[C]) -> list[C]:
    """Return the items that no other one dominates in peak and latency, by increasing peak; of equal ones the first."""
    found: list[C] = []
    for each in sorted(every, key=lambda item: (item.peak, item.latency_ns)):
        if not found or each.latency_ns < found[-1].latency_ns:
            found.append(each)
    return found


def spread(front: Sequence[C], count: int) -> list[C]:
    """Pick up to ``count`` points of a front, evenly spread over its peaks, including the first and the last."""
    if len(front) <= count or not count:
        return list(front[:count])
    low, high = front[0].peak, front[-1].peak
    chosen = {0, len(front) - 1}
    for step in range(1, count - 1):
        wanted = low + (high - low) * step // (count - 1)
        chosen.add(min(range(len(front)), key=lambda index: (abs(front[index].peak - wanted), index)))
    return [front[index] for index in sorted(chosen)]


def sweep(problem: Problem, effort: Effort = FULL, over: Over = never) -> Front[JudgedPlan]:
    """Compute the Pareto front of one step; deterministic unless ``over`` ends it with the plans evaluated so far."""
    if not effort.recompute:
        problem = replace(problem, redo_ok=np.zeros_like(problem.redo_ok))
    floor = lower_bound(problem)
    states = affordable(effort.states, problem.n_nodes)
    judge = BudgetedEvaluator(problem, Objective(memory_limit=floor), states, over=over, watch=effort.watch)
    allow_swap = effort.swap and problem.xfer_ns_per_byte > 0.0
    alike = alike_moves(judge, allow_swap=allow_swap) if effort.stretches else None
    if alike is not None:
        judge.budget = min(effort.states, states + len(effort.stretches) * CLIMB)
    with contextlib.suppress(SearchOver):
        base = judge.plan(judge.untouched)
        other = reordered(judge, base) if effort.reorder else base
        if alike is not None:
            most = min(CLIMB, 2 * judge.budget // (3 * len(effort.stretches)))
            for stretch in effort.stretches:
                alike.climb(Objective(latency_limit_ns=int(stretch * problem.least_ns)), base, most)
        for start in [base] if np.array_equal(base.order, other.order) else [base, other]:
            _slide(judge, start, floor, effort, allow_swap=allow_swap)
        for share in effort.approaches:
            _approach(judge, floor, share, allow_swap=allow_swap)
        for plan in spread(judge.front(), effort.polished):  # neighbours with less latency, or a lower peak
            judge.use(plan.order)
            for goal in (Objective(memory_limit=plan.peak), Objective(latency_limit_ns=plan.latency_ns)):
                climb(judge, goal, plan, allow_swap=allow_swap)
        _mix(judge, spread(judge.front(), effort.mixed), allow_swap=allow_swap)
    return Front(tuple(judge.front()), judge.states, judge.stopped_by_seconds)


def _slide(judge: BudgetedEvaluator, start: JudgedPlan, floor: int, effort: Effort, *, allow_swap: bool) -> None:
    """Propose plans on one order, from the peak of ``start`` down to the lower bound ``floor``."""
    judge.use(start.order)
    limits = [start.peak - (start.peak - floor) * level // effort.levels for level in range(1, effort.levels)]
    if not limits:
        return
    model = LagrangianMinCut(judge.evaluator)
    sets: list[Bools | None] = [None, *checkpoints(judge.evaluator)]
    for kept in sets[:: max(1, len(sets) // effort.sets)]:
        for link_price in (NO_SWAPS, *(effort.link_prices if allow_swap else ())):
            slide_prices(judge, model, limits, rounds=effort.rounds, link_price=link_price, kept=kept)


def _approach(judge: BudgetedEvaluator, floor: int, share: int, *, allow_swap: bool) -> None:
    """Propose plans for one limit between the lowest peak and the lower bound, with prices that start from zero.

    Prices carried over from higher limits grow without bound where nothing more can be saved, and hide other savings.
    """
    leanest = judge.front()[0]
    limit = leanest.peak - (leanest.peak - floor) // share
    if limit == leanest.peak:
        return
    make = Proposer(judge, allow_swap=allow_swap, brief=True)
    make.mix(make.propose(leanest.order, limit, thorough=False), Objective(memory_limit=limit))


def _mix(judge: BudgetedEvaluator, front: Sequence[JudgedPlan], *, allow_swap: bool) -> None:
    """Evaluate mixtures of plans that are some places apart on a front, for limits between their peaks."""
    apart = front[-1].peak // 100 if front else 0
    for first, lean in enumerate(front):
        for distance, shares in MIXTURES:
            cheap = front[min(len(front) - 1, first + distance)]
            if cheap.peak - lean.peak < max(1, apart):
                continue
            judge.use(lean.order)
            cheap = judge.plan(cheap.flags)  # its order may be another one
            if cheap.peak - lean.peak < max(1, apart):
                continue
            for share in range(1, shares):
                goal = Objective(memory_limit=lean.peak + (cheap.peak - lean.peak) * share // shares)
                mixed = relink(judge, goal, cheap, lean)
                if mixed is not None:
                    climb(judge, goal, mixed, allow_swap=allow_swap)


NEIGHBOURS = 8
"""Plans of a front, on each side of the best one, from which a search starts."""


def around_best(front: Sequence[C], goal: Objective) -> list[C]:
    """Return the plans of a front, by increasing peak, that are next to the best one for a goal."""
    if not front:
        return []
    best = min(range(len(front)), key=lambda at: goal.key(front[at].peak, front[at].latency_ns))
    return list(front[max(0, best - NEIGHBOURS) : best + NEIGHBOURS + 1])
