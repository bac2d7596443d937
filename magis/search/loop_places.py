"""Tries places of a step as loops: their order, the end of the trials, and findings of other processes."""

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
"""Multiple of the budget of states after which no further place is tried."""
STRANGE, DELETE = "findings of another step were handed over", "delete the folder that they were kept in"


@dataclass(frozen=True, eq=False)
class PointRecord(PlanCosts):
    """A point without its graphs, as another process, or a file, hands it over."""

    cut: LoopPlace
    plan: JudgedPlan
    body: JudgedPlan


Findings: TypeAlias = Front[PointRecord]
"""The front of one place."""


@dataclass(frozen=True, eq=False)
class TriedPlaces:
    """Fronts of places of a step by their numbers, as this process found them or as others handed them over
    (``findings``), and the latency that no plan of a place avoids, in nanoseconds."""

    fronts: dict[int, FissionFront] = field(default_factory=dict)
    findings: dict[int, Findings] = field(default_factory=dict)
    least_ns: dict[int, int] = field(default_factory=dict)


class Share(Protocol):
    """Callable that has ``findings`` computed elsewhere and yields them in the order of the places, until ``over``."""

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
    """Find the front of a step cut along its batch from some place on (a batch of one picture: along height or width).

    It has no points where nothing can be cut. ``graph`` must be in functional form and free of needless constraints
    (``rewrite.untangle``). A hasty look at the first place comes before all others. The front does not depend on the
    goal itself, nor on the process that computes a place.
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
    """Find the front of all places, tried until one has a plan that is enough, or the budget is spent some times over.

    ``wanted.over`` ends it, too: plans found until then are kept; of places that other processes compute only whole
    ones. Places that were ``tried`` before are not tried again; those of this call are added. Places whose loops alone
    last longer than a ``known`` plan (its peak in bytes and its latency in ns) are left out.
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
    """Try one place, then the others that may be better than it and the known plan; return their points and states."""
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
    """Yield the numbers of the places that may have a better plan than the known one.

    A place whose loops hold those of a beaten one counts as beaten, too: its further operators are not quicker in
    parts.
    """
    beaten: list[int] = []
    for number in untried:
        if known is not None and wanted.over():
            return
        cuts = work.places[number].cuts
        held = (its for its in (work.places[other].cuts for other in beaten) if its.items() <= cuts.items())
        if any(most_parts(its) == most_parts(cuts) for its in held):  # all that a beaten one runs, in as few parts
            continue
        if is_beaten(work, number, wanted, tried, known):
            beaten.append(number)
        else:
            yield number


def is_beaten(
    work: DivisibleStep, number: int, wanted: PlanRequest, tried: TriedPlaces, known: tuple[int, int] | None
) -> bool:
    """Return True if no plan of a place is better than the known one, by its loops in the fewest parts: on no device
    are more parts quicker."""
    if known is None or not wanted.goal.met(*known):
        return False
    if number not in tried.least_ns:
        tried.least_ns[number] = least_ns_at(work, number)
    return wanted.key(*known) <= wanted.key(0, tried.least_ns[number])


def _in_turn(
    numbers: Iterable[int], noted: dict[int, Front[C]], made: Callable[[int], Front[C] | None], wanted: PlanRequest
) -> Generator[Front[C], None, None]:
    """Yield the fronts of places as they come; whole ones are kept in ``noted``."""
    for number in numbers:
        front = noted.get(number)
        if front is None:
            front = made(number)
            if front is None:
                return
            if not wanted.over():
                noted[number] = front
        yield front


def with_little_effort(work: DivisibleStep) -> DivisibleStep:
    """Return the step with little effort for each place."""
    hasty = work.efforts.hasty
    return replace(work, efforts=replace(work.efforts, body=replace(hasty, watch=None), around=hasty))


def first_look(
    work: DivisibleStep,
    wanted: PlanRequest,
    tried: tuple[TriedPlaces, TriedPlaces],
    known: tuple[int, int] | None = None,
    over: Over = never,
) -> FissionFront:
    """Look at the first place with little effort, until ``over``; nothing if no plan of it can beat a ``known`` one.

    ``tried``: places with brief looks, which the front is added to, and places tried wholly, where it is added if brief
    looks are all the effort.
    """
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
    """Find the front of the first place with little effort."""
    if not work.places:
        return FissionFront((), 0)
    return place_front(list(levels_at(work, 0, over)), with_little_effort(work).efforts, over)


def _until_spent(fronts: Iterator[Front[C]], wanted: PlanRequest) -> tuple[list[C], int]:
    """Gather points of places until one is enough, the budget is spent some times over, or the search ends."""
    points: list[C] = []
    spent = 0
    while not (wanted.over() or spent > SCREENING * wanted.budget or any_enough(points, wanted)):
        front = next(fronts, None)
        if front is None:
            break
        points, spent = pareto([*points, *front.points]), spent + front.states
    return points, spent


def findings(work: DivisibleStep, number: int, over: Over = never) -> Findings:
    """Find the front of one of a step's places, without its graphs."""
    front = place_front(list(levels_at(work, number, over)), work.efforts, over)
    points = (
        PointRecord(point.cut, point.plan, point.body.plan)
        for point in front.points
        if point.cut is not None and point.body is not None
    )
    return Findings(tuple(points), front.states)


def _restored(work: DivisibleStep, found: Sequence[PointRecord]) -> Iterator[FissionPoint]:
    """Yield the points of findings. Raises VerifyError if they are not of this step."""
    for number in sorted({each.cut.number for each in found}):
        ours = [each for each in found if each.cut.number == number]
        levels = list(levels_at(work, number))
        if not {each.cut for each in ours} <= {cut for cut, _ in levels}:
            raise VerifyError(STRANGE, hint=DELETE)
        for cut, here in levels:
            for each in ours:
                if each.cut == cut and here.inner is not None:
                    inner = here.inner.compiled.problem
                    _verify_plan(inner, each.body)
                    body = solution(here.inner, inner, each.body, None)
                    _verify_plan(with_body(here, body), each.plan)
                    yield FissionPoint(here, each.plan, cut, body)


def _verify_plan(problem: Problem, plan: JudgedPlan) -> None:
    """Raise VerifyError unless the plan is one of this problem, with the costs that it claims."""
    if (len(plan.order), len(plan.flags)) == (problem.n_nodes, problem.n_storages):
        found = evaluate(problem, plan.order, plan.flags)  # refuses all that is no plan
        if (found.peak, found.latency_ns) == (plan.peak, plan.latency_ns):
            return
    raise VerifyError(STRANGE, hint=DELETE)
