"""The front of a step with fission: every place to cut it at, into every number of parts, planned inside and outside.

    for each place:  sweep the loop's body and the step around it once;
                     judge these plans for every number of parts, each plan of the body with each plan around it

Bodies cut into other numbers of parts differ in sizes and times alone, so plans of one are plans of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from magis.errors import VerifyError
from magis.fission.candidates import most_parts
from magis.fission.expand import expand, reparted
from magis.fission.loss_suffix import Piece, pieces
from magis.fission.region import Region
from magis.graph import Graph
from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective, Over, PlanRequest, Watch, never
from magis.search.loop_nest import LoopNest, LoopNestPlan, PlanCosts, least_ns, level, other_parts, solution, with_body
from magis.search.pareto_sweep import BODY, BRIEF, FULL, Costed, Effort, Front, pareto, spread, sweep
from magis.simulate.compiled_problem import Costs, compile_problem
from magis.simulate.problem import Problem

PARTS = (2, 4, 8, 16, 32)
MOST_OPERATORS = 3000
"""Operators of a step up to which each of its places gets the full effort."""
BODIES = 32
"""Plans of a loop's body that are tried in the step around it."""
AROUND = 32
"""Plans of the step around a loop, of each sweep, that are tried for other bodies."""
HASTY = Effort(levels=6, sets=1, link_prices=(0.1,), polished=0, mixed=0, approaches=(3,), states=2_000)
"""Effort for a first answer: a tenth of a place's time, with figures between those without fission and the final ones.
"""


@dataclass(frozen=True)
class Efforts:
    """Efforts for the body of a loop, for the step around it, and for a first look at either."""

    body: Effort = BODY
    around: Effort = BRIEF
    hasty: Effort = HASTY
    middling: bool = False
    """True if a region is cut into a middling number of parts alone."""


USUAL = Efforts()


@dataclass(frozen=True)
class LoopPlace:
    """The first operator of a region, and its number of parts; ``number`` counts places."""

    at: int
    parts: int
    number: int = 0


@dataclass(frozen=True, eq=False)
class FissionPoint(PlanCosts):
    """A plan of the front. ``cut`` and ``body`` (of the loop) are None where nothing runs in parts."""

    level: LoopNest
    plan: JudgedPlan
    cut: LoopPlace | None = None
    body: LoopNestPlan | None = None

    def solution(self) -> LoopNestPlan:
        """Return the plan with everything inside it, as it is realized."""
        problem = self.level.compiled.problem if self.body is None else with_body(self.level, self.body)
        return solution(self.level, problem, self.plan, self.body)


FissionFront: TypeAlias = Front[FissionPoint]


def whole_front(graph: Graph, costs: Costs, *, reuse: bool, effort: Effort = FULL, over: Over = never) -> FissionFront:
    """Sweep a step of which nothing runs in parts."""
    here = LoopNest(compile_problem(graph, costs, reuse=reuse))
    found = sweep(here.compiled.problem, effort, over)
    points = tuple(FissionPoint(here, plan) for plan in found.points)
    return FissionFront(points, found.states, found.stopped_by_seconds)


@dataclass(frozen=True, eq=False)
class DivisibleStep:
    """A step, in functional form and free of needless constraints, and the places where it may be cut."""

    graph: Graph
    costs: Costs
    reuse: bool
    places: tuple[Piece, ...]
    efforts: Efforts = USUAL


def work_of(graph: Graph, costs: Costs, *, reuse: bool, efforts: Efforts = USUAL) -> DivisibleStep:
    """Find the places at which a step may be cut; of a large step fewer, with less effort."""
    if len(graph.ops) <= MOST_OPERATORS:
        return DivisibleStep(graph, costs, reuse, tuple(pieces(graph)), efforts)
    found = pieces(graph, 1)
    efforts = replace(efforts, body=efforts.hasty, around=efforts.hasty, middling=True)
    return DivisibleStep(graph, costs, reuse, tuple(found), efforts)


def joined(*fronts: FissionFront) -> FissionFront:
    """Join fronts into one."""
    points = (point for front in fronts for point in front.points)
    return FissionFront(tuple(pareto(points)), sum(front.states for front in fronts))


def any_enough(points: Sequence[Costed], wanted: PlanRequest) -> bool:
    """Return True if one of the points is within a memory limit and costs no time."""
    return any(wanted.enough(point.peak, point.latency_ns) for point in points)


def levels_at(work: DivisibleStep, number: int, over: Over = never) -> Iterator[tuple[LoopPlace, LoopNest]]:
    """Yield the region of a place as a loop in every number of parts; once ``over`` says so, only in the first."""
    place = work.places[number]
    first: LoopNest | None = None
    numbers = numbers_of_parts(most_parts(place.cuts))
    for parts in numbers[len(numbers) // 2 :][:1] if work.efforts.middling else numbers:
        region = Region(place.cuts, parts)
        if first is not None and over():
            return
        try:
            if first is None:
                here = first = level(expand(work.graph, region, in_place=True), work.costs, reuse=work.reuse)
            else:
                loop = reparted(work.graph, region, in_place=True)
                here = other_parts(first, loop, work.costs, reuse=work.reuse)
        except VerifyError:
            return  # no legal region (``fission.blocked`` says why), or a kernel refuses the size of a part
        yield LoopPlace(place.at, parts, number), here


def least_ns_at(work: DivisibleStep, number: int) -> int:
    """Return the nanoseconds of the step with a place's loops in the fewest parts and nothing recomputed; 0 if it
    cannot be cut."""
    first = next(levels_at(work, number), None)
    return 0 if first is None else least_ns(first[1])


def numbers_of_parts(most: int) -> list[int]:
    """List the divisors of ``most`` to try, from few to many: powers of two, or others where these are few."""
    even = [parts for parts in PARTS if most % parts == 0]
    return even if len(even) > 1 else [parts for parts in range(2, PARTS[-1] + 1) if most % parts == 0]


def place_front(
    levels: Sequence[tuple[LoopPlace, LoopNest]], efforts: Efforts = USUAL, over: Over = never
) -> FissionFront:
    """Find the front of one region in the numbers of parts of ``levels``.

    The step around the loop is swept for the first and the last of these, with the leanest plan of the body. Where
    ``over`` ends that, there is at least one plan of the first.
    """
    model: LoopNest | None = None
    inside: Sequence[JudgedPlan] = ()
    around: list[JudgedPlan] = []
    points: list[FissionPoint] = []
    states = 0
    for number, (cut, here) in enumerate(levels):
        if points and over():
            break
        inner = here.inner
        if inner is None:
            raise VerifyError("a front of loops needs a loop")
        if model is None or not _same_structure(model, here):
            swept = sweep(inner.compiled.problem, efforts.body, over)
            model, inside, around, states = here, swept.points, [], states + swept.states
        bodies = _judge_plans(inner.compiled.problem, inside)
        states += bodies.states
        for rank, plan in enumerate(spread(bodies.points, BODIES)):
            if points and over():
                break
            body = solution(inner, inner.compiled.problem, plan, None)
            outside = with_body(here, body)
            if rank == 0 and (not around or number == len(levels) - 1):
                swept = sweep(outside, efforts.around, over)
                around, states = [*around, *spread(swept.points, AROUND)], states + swept.states
            found = _judge_plans(outside, around, efforts.around.watch)
            states += found.states
            points += [FissionPoint(here, plan, cut, body) for plan in found.points]
        points = pareto(points)
    return FissionFront(tuple(points), states)


def _same_structure(one: LoopNest, other: LoopNest) -> bool:
    """Return True if plans of one level fit the other: the same nodes take and make the same storages."""
    for first, second in zip(_problems(one), _problems(other), strict=True):
        for name in ("inputs", "outputs", "extras", "reuses"):
            if not all(map(np.array_equal, getattr(first, name), getattr(second, name))):
                return False
    return True


def _problems(level: LoopNest) -> list[Problem]:
    inner = [] if level.inner is None else _problems(level.inner)
    return [level.compiled.problem, *inner]


def _judge_plans(problem: Problem, plans: Sequence[JudgedPlan], watch: Watch | None = None) -> Front[JudgedPlan]:
    """Judge plans that were made for a problem of the same structure, and return their front."""
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), len(plans), watch=watch)
    for plan in plans:
        judge.use(plan.order)
        judge.plan(plan.flags)
    return Front(tuple(judge.front()), judge.states)
