"""Which places of a step are tried as loops, in which order, and when that ends; what other processes find of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

from magis.errors import VerifyError
from magis.fission.candidates import most_parts
from magis.graph import Graph
from magis.search.budgeted_evaluator import JudgedPlan, Over, PlanRequest, never
from magis.search.fission_pareto import (
    USUAL,
    DivisibleStep,
    Efforts,
    FissionFront,
    FissionPoint,
    LoopPlace,
    any_enough,
    joined,
    least_ns_at,
    levels_at,
    place_front,
    work_of,
)
from magis.search.loop_nest import PlanCosts, solution, with_body
from magis.search.pareto_sweep import C, Front, pareto
from magis.simulate.compiled_problem import Costs
from magis.simulate.evaluator import evaluate
from magis.simulate.problem import Problem

SCREENING = 100
"""Times the budget, in states, after which no further place is tried."""
STRANGE, DELETE = "findings of another step were handed over", "delete the folder that they were kept in"


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
    latency that no plan of a place avoids, in nanoseconds."""

    fronts: dict[int, FissionFront] = field(default_factory=dict)
    findings: dict[int, Findings] = field(default_factory=dict)
    least_ns: dict[int, int] = field(default_factory=dict)


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
    untried = reversed(range(len(work.places)))  # the loops of late places are small, and soon tried

    def promising(known: tuple[int, int] | None) -> Iterator[int]:
        return _promising(work, wanted, tried, known, untried)

    def made(number: int) -> FissionFront:
        return place_front(list(levels_at(work, number, wanted.over)), work.efforts, wanted.over)

    if share is None:
        ours = partial(_in_turn, noted=tried.fronts, made=made, wanted=wanted)
        points, spent = _one_and_all(promising, ours, wanted, known)
        return FissionFront(tuple(pareto(points)), spent)

    def shared(numbers: Iterator[int]) -> Generator[Findings, None, None]:
        every = list(numbers)
        with contextlib.closing(share(work, [n for n in every if n not in tried.findings], wanted.over)) as others:
            yield from _in_turn(every, tried.findings, lambda _: next(others, None), wanted)

    found, spent = _one_and_all(promising, shared, wanted, known)
    return FissionFront(tuple(pareto(_restored(work, found))), spent)


def _one_and_all(
    promising: Callable[[tuple[int, int] | None], Iterator[int]],
    tried: Callable[[Iterator[int]], Generator[Front[C], None, None]],
    wanted: PlanRequest,
    known: tuple[int, int] | None,
) -> tuple[list[C], int]:
    """What the places have, and the states: of one, and of the others that may be better than that and the known
    plan."""
    points: list[C] = []
    spent = 0
    for most in (1, None):
        with contextlib.closing(tried(itertools.islice(promising(known), most))) as fronts:
            found, states = _until_spent(fronts, wanted)
        points, spent = pareto([*points, *found]), spent + states
        if any_enough(points, wanted):
            break
        if known is not None:
            known = min((known, *((each.peak, each.latency_ns) for each in points)), key=lambda each: wanted.key(*each))
    return points, spent


def _promising(
    work: DivisibleStep,
    wanted: PlanRequest,
    tried: TriedPlaces,
    known: tuple[int, int] | None,
    untried: Iterator[int],
) -> Iterator[int]:
    """Numbers of the places that may have a better plan than the known one. A place whose loops hold those of one that
    has none is taken to have none either: what it runs in parts besides is not quicker so."""
    beaten: list[int] = []
    for number in untried:
        if known is not None and wanted.over():
            return
        if any(_holds(work, number, other) for other in beaten):
            continue
        if is_beaten(work, number, wanted, tried, known):
            beaten.append(number)
        else:
            yield number


def is_beaten(
    work: DivisibleStep, number: int, wanted: PlanRequest, tried: TriedPlaces, known: tuple[int, int] | None
) -> bool:
    """Whether no plan of a place is better than the known one, by its loops in the fewest parts, which are taken to be
    the quickest: no price of a device says that more parts are."""
    if known is None or not wanted.goal.met(*known):
        return False
    if number not in tried.least_ns:
        tried.least_ns[number] = least_ns_at(work, number)
    return wanted.key(*known) <= wanted.key(0, tried.least_ns[number])


def _holds(work: DivisibleStep, number: int, other: int) -> bool:
    """Whether the loops of a place run all that those of another one run, in as few parts."""
    mine, its = work.places[number].cuts, work.places[other].cuts
    return its.items() <= mine.items() and most_parts(its) == most_parts(mine)


def _in_turn(
    numbers: Iterable[int], noted: dict[int, Front[C]], made: Callable[[int], Front[C] | None], wanted: PlanRequest
) -> Generator[Front[C], None, None]:
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


def hastily(work: DivisibleStep) -> DivisibleStep:
    """The same step with little effort for each place."""
    hasty = work.efforts.hasty
    return replace(work, efforts=replace(work.efforts, body=replace(hasty, watch=None), around=hasty))


def first_look(
    work: DivisibleStep,
    wanted: PlanRequest,
    tried: tuple[TriedPlaces, TriedPlaces],
    known: tuple[int, int] | None = None,
    over: Over = never,
) -> FissionFront:
    """What the first place gives with little effort, as far as it was looked at until ``over``; kept in the first of
    ``tried``, places with brief looks, and where that is all the effort in the second, with whole ones. Nothing where
    no plan of that place is better than a ``known`` one."""
    briefly, wholly = tried
    if over() or not work.places or is_beaten(work, 0, wanted, wholly, known):
        return FissionFront((), 0)
    if (found := briefly.fronts.get(0)) is None:
        found = sketch(work, over)
        if not over():
            for each in tried if work.efforts.middling else (briefly,):
                each.fronts.setdefault(0, found)  # nothing more would be tried there
    return found


def sketch(work: DivisibleStep, over: Over = never) -> FissionFront:
    """A first answer: the first place with little effort."""
    if not work.places:
        return FissionFront((), 0)
    return place_front(list(levels_at(work, 0, over)), hastily(work).efforts, over)


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
