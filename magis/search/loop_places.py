"""Search over the places of a step that can become loops: their order, its end, and findings of other processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

from magis.errors import VerifyError
from magis.fission.region import most_parts
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
    """A front point without its graphs, as another process or a file provides it."""

    cut: LoopPlace
    plan: JudgedPlan
    body: JudgedPlan


Findings: TypeAlias = Front[PointRecord]
"""The front of one place, without graphs."""


@dataclass(frozen=True, eq=False)
class TriedPlaces:
    """Cached fronts of a step's places by index, computed here (``fronts``) or by other processes (``findings``), and
    each place's lowest latency in ns."""

    fronts: dict[int, FissionFront] = field(default_factory=dict)
    findings: dict[int, Findings] = field(default_factory=dict)
    least_ns: dict[int, int] = field(default_factory=dict)


class Share(Protocol):
    """Callable that has other processes compute ``findings`` and yields them in the order of the places, until
    ``over``."""

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
    """Compute the Pareto front of a step split along its batch from some place on (a single image: along height or
    width).

    The front is empty if nothing can be split. ``graph`` must be functionalized, without needless ordering edges
    (``rewrite.untangle``). A quick search of the first place runs before all others. The front does not depend on the
    goal, nor on the process that computes a place.
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
    """Compute the Pareto front of all places, until a plan is good enough, or ``SCREENING`` times the budget is spent.

    ``wanted.over`` ends the search, too: plans found so far are kept, but only complete places of other processes.
    Places in ``tried`` are not searched again; new ones are added there. Places whose loops alone take longer than the
    ``known`` plan (peak in bytes, latency in ns) are skipped.
    """
    tried = TriedPlaces() if tried is None else tried
    untried = reversed(range(len(work.places)))  # late places have small loops, which are fast to search

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
    """Search one place, then those that may beat it and the known plan; return their points and states."""
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
    """Yield the indices of the places that may have a better plan than the known one.

    A place whose loops contain those of a beaten place is skipped, too: more operators in the loop do not make it
    faster.
    """
    beaten: list[int] = []
    for number in untried:
        if known is not None and wanted.over():
            return
        cuts, graph = work.places[number].cuts, work.places[number].graph
        held = (
            its
            for its in (work.places[other].cuts for other in beaten if work.places[other].graph is graph)
            if its.items() <= cuts.items()
        )
        if any(most_parts(its) == most_parts(cuts) for its in held):  # contains a beaten loop, in as many parts
            continue
        if is_beaten(work, number, wanted, tried, known):
            beaten.append(number)
        else:
            yield number


def is_beaten(
    work: DivisibleStep, number: int, wanted: PlanRequest, tried: TriedPlaces, known: tuple[int, int] | None
) -> bool:
    """Return True if no plan of a place beats the known one: the lowest latency in the fewest parts is too high."""
    if known is None or not wanted.goal.met(*known):
        return False
    if number not in tried.least_ns:
        tried.least_ns[number] = least_ns_at(work, number)
    return wanted.key(*known) <= wanted.key(0, tried.least_ns[number])


def _in_turn(
    numbers: Iterable[int], noted: dict[int, Front[C]], made: Callable[[int], Front[C] | None], wanted: PlanRequest
) -> Generator[Front[C], None, None]:
    """Yield the fronts of places in order; complete ones are cached in ``noted``."""
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
    """Return the step with low search effort for each place."""
    hasty = work.efforts.hasty
    return replace(work, efforts=replace(work.efforts, body=replace(hasty, watch=None), around=hasty))


def first_look(
    work: DivisibleStep,
    wanted: PlanRequest,
    tried: tuple[TriedPlaces, TriedPlaces],
    known: tuple[int, int] | None = None,
    over: Over = never,
) -> FissionFront:
    """Search the first place with low effort, until ``over``; the front is empty if no plan there can beat the
    ``known`` one.

    ``tried``: caches of quickly and of fully searched places. The front is added to the first, and also to the second
    if low effort is all that the step gets.
    """
    briefly, wholly = tried
    if over() or not work.places or is_beaten(work, 0, wanted, wholly, known):
        return FissionFront((), 0)
    if (found := briefly.fronts.get(0)) is None:
        found = sketch(work, over)
        if not over():
            for each in tried if work.efforts.middling else (briefly,):
                each.fronts.setdefault(0, found)  # full effort equals low effort
    return found


def sketch(work: DivisibleStep, over: Over = never) -> FissionFront:
    """Compute the Pareto front of the first place with low effort."""
    if not work.places:
        return FissionFront((), 0)
    return place_front(list(levels_at(work, 0, over)), with_little_effort(work).efforts, over)


def _until_spent(fronts: Iterator[Front[C]], wanted: PlanRequest) -> tuple[list[C], int]:
    """Collect points of places until a plan is good enough, ``SCREENING`` times the budget is spent, or time is up."""
    points: list[C] = []
    spent = 0
    while not (wanted.over() or spent > SCREENING * wanted.budget or any_enough(points, wanted)):
        front = next(fronts, None)
        if front is None:
            break
        points, spent = pareto([*points, *front.points]), spent + front.states
    return points, spent


def findings(work: DivisibleStep, number: int, over: Over = never) -> Findings:
    """Compute the Pareto front of one place of a step, without its graphs."""
    front = place_front(list(levels_at(work, number, over)), work.efforts, over)
    points = (
        PointRecord(point.cut, point.plan, point.body.plan)
        for point in front.points
        if point.cut is not None and point.body is not None
    )
    return Findings(tuple(points), front.states)


def _restored(work: DivisibleStep, found: Sequence[PointRecord]) -> Iterator[FissionPoint]:
    """Yield the front points of findings, with their graphs. Raises VerifyError if the findings are of another step."""
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
    """Raise VerifyError unless a plan is legal for the problem and has the costs that it claims."""
    if (len(plan.order), len(plan.flags)) == (problem.n_nodes, problem.n_storages):
        found = evaluate(problem, plan.order, plan.flags)  # raises VerifyError for an illegal plan
        if (found.peak, found.latency_ns) == (plan.peak, plan.latency_ns):
            return
    raise VerifyError(STRANGE, hint=DELETE)
