"""The front of a step with fission: every place to cut it at, into every number of parts, planned inside and outside.

    for each place:  sweep the loop's body and the step around it once;
                     judge what was found for every number of parts, each plan of the body with each plan around it

Bodies cut into other numbers of parts differ in sizes and times alone, so plans of one are plans of all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np

from magis.errors import VerifyError
from magis.fission.candidates import most_parts
from magis.fission.expand import expand, reparted
from magis.fission.loss_suffix import Piece, pieces
from magis.fission.region import Region
from magis.graph import Graph
from magis.search.budgeted_evaluator import (
    BudgetedEvaluator,
    JudgedPlan,
    Objective,
    Over,
    PlanRequest,
    Watch,
    never,
)
from magis.search.loop_nest import (
    LoopNest,
    LoopNestPlan,
    PlanCosts,
    least_ns,
    level,
    other_parts,
    solution,
    with_body,
)
from magis.search.pareto_sweep import BODY, BRIEF, FULL, C, Costed, Effort, Front, pareto, spread, sweep
from magis.simulate.compiled_problem import Costs, compile_problem
from magis.simulate.evaluator import evaluate
from magis.simulate.problem import Problem

PARTS = (2, 4, 8, 16, 32)
SCREENING = 100
"""Times the budget, in states, after which no further place is tried."""
MOST_OPERATORS = 3000
"""Of a step for whose places all is tried."""
BODIES = 32
"""Plans of a loop's body that are tried in the step around it."""
STRANGE, DELETE = "findings of another step were handed over", "delete the folder that they were kept in"
AROUND = 32
"""Plans of the step around a loop, of each sweep, that are tried for other bodies."""


HASTY = Effort(levels=6, sets=1, link_prices=(0.1,), polished=0, mixed=0, approaches=(3,), states=2_000)
"""For a first answer: a tenth of the time of a place, with figures between those without fission and the final ones."""


@dataclass(frozen=True)
class Efforts:
    """What may be tried for the body of a loop, for the step around it, and for either before anything else."""

    body: Effort = BODY
    around: Effort = BRIEF
    hasty: Effort = HASTY
    middling: bool = False
    """Whether a region is cut into a middling number of parts alone."""


USUAL = Efforts()


@dataclass(frozen=True)
class LoopPlace:
    """From which operator on, and into how many parts; ``number`` counts places."""

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
        """The plan with everything inside it, as it is realized."""
        problem = self.level.compiled.problem if self.body is None else with_body(self.level, self.body)
        return solution(self.level, problem, self.plan, self.body)


FissionFront: TypeAlias = Front[FissionPoint]


def whole_front(graph: Graph, costs: Costs, *, reuse: bool, effort: Effort = FULL, over: Over = never) -> FissionFront:
    """The front of a step of which nothing runs in parts."""
    here = LoopNest(compile_problem(graph, costs, reuse=reuse))
    found = sweep(here.compiled.problem, effort, over)
    return FissionFront(tuple(FissionPoint(here, plan) for plan in found.points), found.states)


@dataclass(frozen=True, eq=False)
class DivisibleStep:
    """A step, in functional form and free of needless constraints, and where it may be cut."""

    graph: Graph
    costs: Costs
    reuse: bool
    places: tuple[Piece, ...]
    efforts: Efforts = USUAL


@dataclass(frozen=True, eq=False)
class PointRecord(PlanCosts):
    """A point without its graphs: what another process, or a file, hands over."""

    cut: LoopPlace
    plan: JudgedPlan
    body: JudgedPlan


Findings: TypeAlias = Front[PointRecord]
"""The front of one place."""


@dataclass(frozen=True, eq=False)
class TriedPlaces:
    """Fronts of places of a step by their numbers, as this process found them or as others handed them over; the
    latency that no plan of a place avoids, in nanoseconds; levels of the place that is to be tried next."""

    fronts: dict[int, FissionFront] = field(default_factory=dict)
    findings: dict[int, Findings] = field(default_factory=dict)
    least_ns: dict[int, int] = field(default_factory=dict)
    levels: dict[int, list[tuple[LoopPlace, LoopNest]]] = field(default_factory=dict)


class Share(Protocol):
    """Has ``findings`` computed for places of a step, and hands them over in their order, until ``over``."""

    def __call__(self, work: DivisibleStep, numbers: Sequence[int], over: Over) -> Generator[Findings, None, None]: ...


def divided_front(
    graph: Graph,
    costs: Costs,
    wanted: PlanRequest,
    *,
    reuse: bool,
    efforts: Efforts = USUAL,
    share: Share | None = None,
) -> FissionFront:
    """The front of a step cut along its batch from some place on (a batch of one picture: along height or width);
    without any points where nothing can be cut.

    ``graph`` must be in functional form and free of needless constraints (``rewrite.untangle``). A hasty look at the
    first place comes before all others. The goal itself plays no part, nor does it matter who computes the places.
    """
    work = work_of(graph, costs, reuse=reuse, efforts=efforts)
    return joined(sketch(work), places_front(work, wanted, share))


def work_of(graph: Graph, costs: Costs, *, reuse: bool, efforts: Efforts = USUAL) -> DivisibleStep:
    """A step with the places at which it may be cut; of a large step fewer, for which less is tried."""
    if len(graph.ops) <= MOST_OPERATORS:
        return DivisibleStep(graph, costs, reuse, tuple(pieces(graph)), efforts)
    found = pieces(graph, 1)
    efforts = replace(efforts, body=efforts.hasty, around=efforts.hasty, middling=True)
    return DivisibleStep(graph, costs, reuse, tuple(found), efforts)


def joined(*fronts: FissionFront) -> FissionFront:
    """The front of all of them."""
    points = (point for front in fronts for point in front.points)
    return FissionFront(tuple(pareto(points)), sum(front.states for front in fronts))


def places_front(
    work: DivisibleStep,
    wanted: PlanRequest,
    share: Share | None = None,
    tried: TriedPlaces | None = None,
    known: tuple[int, int] | None = None,
) -> FissionFront:
    """The front of all places, tried until one has a plan that is enough, a few times the budget of states is spent, or
    ``wanted.over`` says so (what was found until then is kept; of places that other processes compute only whole ones).

    Places that were ``tried`` before are not tried again; those of this call are added. Nor are those tried whose loops
    alone last longer than a ``known`` plan (its peak in bytes and its latency in ns).
    """
    tried = TriedPlaces() if tried is None else tried
    numbers = _promising(work, wanted, tried, known)
    if share is not None:
        every = list(numbers)
        tried.levels.clear()  # those are made where the places are tried
        with contextlib.closing(share(work, [n for n in every if n not in tried.findings], wanted.over)) as shared:
            fronts = _in_turn(every, tried.findings, lambda _: next(shared, None), wanted)
            found, spent = _until_spent(fronts, wanted)
        return FissionFront(tuple(pareto(_restored(work, found))), spent)

    def made(number: int) -> FissionFront:
        levels = tried.levels.pop(number, None) or levels_at(work, number, wanted.over)
        return place_front(list(levels), work.efforts, wanted.over)

    points, spent = _until_spent(_in_turn(numbers, tried.fronts, made, wanted), wanted)
    return FissionFront(tuple(pareto(points)), spent)


def _promising(
    work: DivisibleStep, wanted: PlanRequest, tried: TriedPlaces, known: tuple[int, int] | None
) -> Iterator[int]:
    """Numbers of the places that may have a better plan than the known one."""
    for number in range(len(work.places)):
        if known is not None and wanted.goal.met(*known):
            if number not in tried.least_ns:
                levels = list(levels_at(work, number, wanted.over))
                if wanted.over():  # they may be incomplete
                    return
                tried.least_ns[number] = min((least_ns(here) for _, here in levels), default=0)
                tried.levels.clear()
                if number not in tried.fronts:
                    tried.levels[number] = levels
            if wanted.key(*known) <= wanted.key(0, tried.least_ns[number]):
                continue
        yield number


def _in_turn(
    numbers: Iterable[int], noted: dict[int, Front[C]], made: Callable[[int], Front[C] | None], wanted: PlanRequest
) -> Iterator[Front[C]]:
    """The fronts of places as they come; whole ones are noted."""
    for number in numbers:
        front = noted.get(number)
        if front is None:
            front = made(number)
            if front is None:
                return
            if not wanted.over():
                noted[number] = front
        yield front


def sketch(work: DivisibleStep) -> FissionFront:
    """A first answer: the first place with little effort."""
    if not work.places:
        return FissionFront((), 0)
    hasty = work.efforts.hasty
    return place_front(list(levels_at(work, 0)), Efforts(replace(hasty, watch=None), hasty))


def _until_spent(fronts: Iterator[Front[C]], wanted: PlanRequest) -> tuple[list[C], int]:
    """What the places have, until that is enough, a few times the budget of states is spent or the search is over."""
    points: list[C] = []
    spent = 0
    while not (wanted.over() or spent > SCREENING * wanted.budget or any_enough(points, wanted)):
        front = next(fronts, None)
        if front is None:
            break
        points, spent = pareto([*points, *front.points]), spent + front.states
    return points, spent


def any_enough(points: Sequence[Costed], wanted: PlanRequest) -> bool:
    """Whether one of them is within a memory limit and costs no time."""
    return any(wanted.enough(point.peak, point.latency_ns) for point in points)


def findings(work: DivisibleStep, number: int, over: Over = never) -> Findings:
    """The front of one of a step's places."""
    front = place_front(list(levels_at(work, number, over)), work.efforts, over)
    points = (
        PointRecord(point.cut, point.plan, point.body.plan)
        for point in front.points
        if point.cut is not None and point.body is not None
    )
    return Findings(tuple(points), front.states)


def _restored(work: DivisibleStep, found: Sequence[PointRecord]) -> Iterator[FissionPoint]:
    """The points of findings; VerifyError if they are not of this step."""
    for number in sorted({each.cut.number for each in found}):
        ours = [each for each in found if each.cut.number == number]
        levels = list(levels_at(work, number))
        if not {each.cut for each in ours} <= {cut for cut, _ in levels}:
            raise VerifyError(STRANGE, hint=DELETE)
        for cut, here in levels:
            for each in ours:
                if each.cut == cut and here.inner is not None:
                    inner = here.inner.compiled.problem
                    _check(inner, each.body)
                    body = solution(here.inner, inner, each.body, None)
                    _check(with_body(here, body), each.plan)
                    yield FissionPoint(here, each.plan, cut, body)


def _check(problem: Problem, plan: JudgedPlan) -> None:
    """VerifyError unless the plan is one of this problem, with the costs that it claims."""
    if (len(plan.order), len(plan.flags)) == (problem.n_nodes, problem.n_storages):
        found = evaluate(problem, plan.order, plan.flags)  # which refuses what is no plan
        if (found.peak, found.latency_ns) == (plan.peak, plan.latency_ns):
            return
    raise VerifyError(STRANGE, hint=DELETE)


def levels_at(work: DivisibleStep, number: int, over: Over = never) -> Iterator[tuple[LoopPlace, LoopNest]]:
    """The region of a place as a loop, cut into every number of parts; only into the first of them where all is
    ``over``."""
    place = work.places[number]
    numbers = numbers_of_parts(most_parts(place.cuts))
    first: LoopNest | None = None
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


def numbers_of_parts(most: int) -> list[int]:
    """Divisors of ``most`` to try, from few to many: powers of two, or others where there are few of these."""
    even = [parts for parts in PARTS if most % parts == 0]
    return even if len(even) > 1 else [parts for parts in range(2, PARTS[-1] + 1) if most % parts == 0]


def place_front(
    levels: Sequence[tuple[LoopPlace, LoopNest]], efforts: Efforts = USUAL, over: Over = never
) -> FissionFront:
    """The front of one region, cut into the numbers of parts that are given.

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
        if model is None or not _alike(model, here):
            swept = sweep(inner.compiled.problem, efforts.body, over)
            model, inside, around, states = here, swept.points, [], states + swept.states
        bodies = _judged(inner.compiled.problem, inside)
        states += bodies.states
        for rank, plan in enumerate(spread(bodies.points, BODIES)):
            if points and over():
                break
            body = solution(inner, inner.compiled.problem, plan, None)
            outside = with_body(here, body)
            if rank == 0 and (not around or number == len(levels) - 1):
                swept = sweep(outside, efforts.around, over)
                around, states = [*around, *spread(swept.points, AROUND)], states + swept.states
            found = _judged(outside, around, efforts.around.watch)
            states += found.states
            points += [FissionPoint(here, plan, cut, body) for plan in found.points]
        points = pareto(points)
    return FissionFront(tuple(points), states)


def _alike(one: LoopNest, other: LoopNest) -> bool:
    """Whether plans of one level are plans of the other: the same nodes take and make the same storages, throughout."""
    for first, second in zip(_problems(one), _problems(other), strict=True):
        for name in ("inputs", "outputs", "extras", "reuses"):
            if not all(map(np.array_equal, getattr(first, name), getattr(second, name))):
                return False
    return True


def _problems(level: LoopNest) -> list[Problem]:
    inner = [] if level.inner is None else _problems(level.inner)
    return [level.compiled.problem, *inner]


def _judged(problem: Problem, plans: Sequence[JudgedPlan], watch: Watch | None = None) -> Front[JudgedPlan]:
    """The front of plans that were made for a problem of the same structure."""
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), len(plans), watch=watch)
    for plan in plans:
        judge.use(plan.order)
        judge.plan(plan.flags)
    return Front(tuple(judge.front()), judge.states)
