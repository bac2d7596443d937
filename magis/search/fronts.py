"""The front of a step with fission: every place to cut it at, into every number of parts, planned inside and outside.

    for each place:  sweep the loop's body and the step around it once;
                     judge what was found for every number of parts, each plan of the body with each plan around it

Bodies cut into other numbers of parts differ in sizes and times alone, so plans of one are plans of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from magis.aten.splits import Split
from magis.errors import VerifyError
from magis.fission.expand import expand, reparted
from magis.fission.grow import connected, most_parts
from magis.fission.region import Region
from magis.fission.suffix import Axis, axes, places, suffix
from magis.ir import Graph
from magis.search.driver import SearchResult
from magis.search.front import BODY, BRIEF, FULL, Effort, Front, pareto, spread, sweep
from magis.search.judge import Goal, Judge, Plan, Wanted, Watch
from magis.search.levels import Level, Solution, level, other_parts, solution, with_body
from magis.simulate.compile import Costs, compile_problem
from magis.simulate.problem import Problem

PARTS = (2, 4, 8, 16, 32)
PLACES = 8
SCREENING = 100
"""Times the budget, in states, after which no further place is tried."""
BODIES = 8
"""Plans of a loop's body that are tried in the step around it."""


AROUND = 32
"""Plans of the step around a loop, of each sweep, that are tried for other bodies."""


@dataclass(frozen=True)
class Efforts:
    """What may be tried for the body of a loop, and for the step around it."""

    body: Effort = BODY
    around: Effort = BRIEF


USUAL = Efforts()


@dataclass(frozen=True)
class Cut:
    """From which position of the forward pass on, and into how many parts; ``number`` counts places and axes."""

    at: int
    parts: int
    number: int = 0


@dataclass(frozen=True, eq=False)
class Point:
    """A plan of the front. ``cut`` and ``body`` (of the loop) are None where nothing runs in parts."""

    level: Level
    plan: Plan
    cut: Cut | None = None
    body: Solution | None = None

    @property
    def peak(self) -> int:
        return self.plan.peak

    @property
    def latency_ns(self) -> int:
        return self.plan.latency_ns

    def solution(self) -> Solution:
        """The plan with everything inside it, as it is realized."""
        problem = self.level.compiled.problem if self.body is None else with_body(self.level, self.body)
        return solution(self.level, problem, _result(self.plan), self.body)


@dataclass(frozen=True, eq=False)
class FissionFront:
    """Points by rising peak and falling latency; states evaluated on the way."""

    points: tuple[Point, ...]
    states: int


def whole_front(graph: Graph, costs: Costs, *, reuse: bool, effort: Effort = FULL) -> FissionFront:
    """The front of a step of which nothing runs in parts."""
    here = Level(compile_problem(graph, costs, reuse=reuse))
    found = sweep(here.compiled.problem, effort)
    return FissionFront(tuple(Point(here, plan) for plan in found.plans), found.states)


def divided_front(graph: Graph, costs: Costs, wanted: Wanted, *, reuse: bool, efforts: Efforts = USUAL) -> FissionFront:
    """The front of a step cut along its batch from some place on (a batch of one picture: along height or width);
    without any points where nothing can be cut.

    ``graph`` must be in functional form and free of needless constraints (``rewrite.untangle``). Places are tried
    until a few times the budget of states is spent, or ``wanted.over`` says so; the goal itself plays no part.
    """
    points: list[Point] = []
    spent = 0
    for number, (axis, at) in enumerate(_places(graph)):
        if wanted.over() or spent > SCREENING * wanted.budget:
            break
        cuts = suffix(graph, axis, at).cuts
        if cuts:
            region = connected(graph, cuts, 1)[0].cuts
            found = place_front(list(_levels(graph, Cut(at, 0, number), region, costs, reuse=reuse)), efforts)
            points = pareto([*points, *found.points])
            spent += found.states
    return FissionFront(tuple(points), spent)


def _places(graph: Graph) -> Iterator[tuple[Axis, int]]:
    """Where regions may begin, and the axis that they are cut along."""
    for axis in axes(graph):
        for at in places(graph, axis, PLACES):
            yield axis, at


def _levels(
    graph: Graph, start: Cut, cuts: Mapping[int, Split], costs: Costs, *, reuse: bool
) -> Iterator[tuple[Cut, Level]]:
    """The region as a loop, by rising numbers of parts."""
    first: Level | None = None
    for parts in numbers_of_parts(most_parts(cuts)):
        region = Region(cuts, parts)
        try:
            if first is None:
                here = first = level(expand(graph, region, in_place=True), costs, reuse=reuse)
            else:
                here = other_parts(first, reparted(graph, region, in_place=True), costs, reuse=reuse)
        except VerifyError:
            return  # no legal region (``fission.blocked`` says why), or a kernel refuses the size of a part
        yield replace(start, parts=parts), here


def numbers_of_parts(most: int) -> list[int]:
    """Divisors of ``most`` to try, from few to many: powers of two, or others where there are few of these."""
    even = [parts for parts in PARTS if most % parts == 0]
    return even if len(even) > 1 else [parts for parts in range(2, PARTS[-1] + 1) if most % parts == 0]


def place_front(levels: Sequence[tuple[Cut, Level]], efforts: Efforts = USUAL) -> FissionFront:
    """The front of one region, cut into the numbers of parts that are given.

    The step around the loop is swept for the first and the last of these, with the leanest plan of the body.
    """
    model: Level | None = None
    inside: Sequence[Plan] = ()
    around: list[Plan] = []
    points: list[Point] = []
    states = 0
    for number, (cut, here) in enumerate(levels):
        inner = here.inner
        if inner is None:
            raise VerifyError("a front of loops needs a loop")
        if model is None or not _alike(model, here):
            swept = sweep(inner.compiled.problem, efforts.body)
            model, inside, around, states = here, swept.plans, [], states + swept.states
        bodies = _judged(inner.compiled.problem, inside)
        states += bodies.states
        for rank, plan in enumerate(spread(bodies.plans, BODIES)):
            body = solution(inner, inner.compiled.problem, _result(plan), None)
            outside = with_body(here, body)
            if rank == 0 and (not around or number == len(levels) - 1):
                swept = sweep(outside, efforts.around)
                around, states = [*around, *spread(swept.plans, AROUND)], states + swept.states
            found = _judged(outside, around, efforts.around.watch)
            states += found.states
            points += [Point(here, plan, cut, body) for plan in found.plans]
        points = pareto(points)
    return FissionFront(tuple(points), states)


def _alike(one: Level, other: Level) -> bool:
    """Whether plans of one level are plans of the other: the same nodes take and make the same storages, throughout."""
    for first, second in zip(_problems(one), _problems(other), strict=True):
        for name in ("in_ptr", "in_idx", "out_ptr", "out_idx", "extra_ptr", "extra_idx", "reuse_ptr", "reuse_idx"):
            if not np.array_equal(getattr(first, name), getattr(second, name)):
                return False
    return True


def _problems(level: Level) -> list[Problem]:
    inner = [] if level.inner is None else _problems(level.inner)
    return [level.compiled.problem, *inner]


def _judged(problem: Problem, plans: Sequence[Plan], watch: Watch | None = None) -> Front:
    """The front of plans that were made for a problem of the same structure."""
    judge = Judge(problem, Goal(memory_limit=0), len(plans), watch=watch)
    for plan in plans:
        judge.use(plan.order)
        judge.plan(plan.flags)
    return Front(tuple(judge.front()), judge.states)


def _result(plan: Plan) -> SearchResult:
    return SearchResult(
        plan.order, plan.flags, plan.peak, plan.latency_ns, states=0, stopped_by_seconds=False, feasible=True,
        lower_bound=0,
    )  # fmt: skip
