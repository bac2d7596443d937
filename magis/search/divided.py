"""Fission in the search: where the step is cut into parts, into how many, and what is recomputed inside and outside.

A configuration is a place of the forward pass with a number of parts: everything from there to the loss and back, or as
far as it can be cut, runs as a loop (``magis.fission.suffix``). The front of all configurations
(``magis.search.fronts``) says which of them are the best under a goal; these are planned thoroughly. Loops within loops
are never tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from magis.search.fronts import Cut, FissionFront, Point, place_front
from magis.search.judge import Goal, Wanted
from magis.search.levels import Level, Solution, bound, level, solution, solve, with_body
from magis.simulate.compile import Costs
from magis.simulate.evaluator import evaluate

FINALISTS = 3
"""Configurations that are planned thoroughly; two under a latency limit, where that takes several searches."""
SQUEEZES = 8
"""Attempts to get below the peak of a finalist."""
FIRST_SQUEEZE = 8
"""The first step is this share of the peak; each failure makes the next one a third as long."""
LEAST_ROOM = 40
"""A peak less than this share of itself above what the configuration needs at least is not squeezed."""
FAILURES = 3
"""After so many, a finalist stands."""


@dataclass(frozen=True, eq=False)
class Divided:
    """A planned step with loops."""

    cuts: tuple[Cut, ...]
    level: Level
    solution: Solution
    states: int = 0


def divide(front: FissionFront, wanted: Wanted, *, known: tuple[int, int] | None = None) -> Divided | None:
    """The best divided step under the goal, of those on a step's front (``magis.search.fronts.divided_front``).

    None if there is none, or only such that are no better than the ``known`` plan (its peak in bytes and its latency in
    ns). The states of the front count.
    """
    return _best(front.points, wanted, front.states, known)


def replan(found: Divided, costs: Costs, wanted: Wanted, *, reuse: bool) -> Divided:
    """The same configuration planned with other costs, or under another goal."""
    here = level(found.level.compiled.graph, costs, reuse=reuse)
    front = place_front([(found.cuts[0], here)], over=wanted.over)
    best = _best(front.points, wanted, front.states, None)
    return found if best is None else best


def _best(points: tuple[Point, ...], wanted: Wanted, states: int, known: tuple[int, int] | None) -> Divided | None:
    """The best configurations of a front planned thoroughly, and the best of that."""
    ranked = sorted(points, key=lambda point: wanted.key(point.peak, point.latency_ns))
    by_cut: dict[Cut | None, Point] = {}
    for point in ranked:
        by_cut.setdefault(point.cut, point)
    finalists = list(by_cut.values())
    best: Divided | None = None
    for point in finalists[: FINALISTS if wanted.goal.memory_limit is not None else FINALISTS - 1]:
        if point.cut is None:
            continue
        start = point.solution()
        solution, spent = (start, 0) if wanted.over() else _thoroughly(point.level, start, wanted)
        states += spent
        if best is None or wanted.key(solution.peak, solution.latency_ns) < _key(best, wanted):
            best = Divided((point.cut,), point.level, solution)
    if best is None or (known is not None and _key(best, wanted) >= wanted.key(*known)):
        return None
    return replace(best, states=states)


def _key(divided: Divided, wanted: Wanted) -> tuple[int, int]:
    return wanted.key(divided.solution.peak, divided.solution.latency_ns)


def _thoroughly(here: Level, start: Solution, wanted: Wanted) -> tuple[Solution, int]:
    """The best plan for a configuration, no worse than ``start``, and the states that it took."""
    limit = wanted.goal.memory_limit
    if limit is None:
        squeezed, states = _squeezed(here, start, wanted)
        last = squeezed if wanted.over() else to_the_end(here, squeezed, wanted)
        return min(squeezed, last, key=lambda each: wanted.key(each.peak, each.latency_ns)), states + last.states
    tried = _solved(here, limit, wanted)
    return min(start, tried, key=lambda each: wanted.key(each.peak, each.latency_ns)), tried.states


def _squeezed(here: Level, start: Solution, wanted: Wanted) -> tuple[Solution, int]:
    """The same under a latency limit: plans for memory limits below the best peak so far."""
    floor = bound(here)
    best, states, failures = start, 0, 0
    step = min(start.peak // FIRST_SQUEEZE, (start.peak - floor) // 2)
    for _ in range(SQUEEZES):
        if best.peak - floor < best.peak // LEAST_ROOM:
            break
        tried = _solved(here, max(floor, best.peak - step), wanted)
        states += tried.states
        if wanted.key(tried.peak, tried.latency_ns) < wanted.key(best.peak, best.latency_ns):
            best = tried
        else:
            failures, step = failures + 1, step // 3
        if failures == FAILURES or wanted.over():
            break
    return best, states


def to_the_end(here: Level, start: Solution, wanted: Wanted) -> Solution:
    """The same plan around a leaner body, which may take what is left of the time."""
    inner, limit = start.inner, wanted.goal.latency_limit_ns
    if here.inner is None or inner is None or limit is None or start.latency_ns > limit:
        return replace(start, states=0)
    left = Goal(latency_limit_ns=inner.latency_ns + (limit - start.latency_ns) // here.parts)
    body = solve(here.inner, left, max(1, wanted.budget // 4), wanted.seed, over=wanted.over)
    problem = with_body(here, body)
    found = evaluate(problem, start.result.order, start.result.flags)
    result = replace(start.result, peak=found.peak, latency_ns=found.latency_ns, states=1)
    return solution(here, problem, result, body)


def _solved(here: Level, limit: int, wanted: Wanted) -> Solution:
    return solve(here, Goal(memory_limit=limit), max(1, wanted.budget // 4), wanted.seed, over=wanted.over)
