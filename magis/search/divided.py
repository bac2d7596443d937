"""Fission in the search: where the step is cut into parts, into how many, and what is recomputed inside and outside.

A configuration is a place of the forward pass with a number of parts: everything from there to the loss and back, or as
far as it can be cut, runs as a loop (``magis.fission.suffix``). Loops within loops are never tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from magis.errors import VerifyError
from magis.fission.expand import expand
from magis.fission.grow import connected, most_parts
from magis.fission.region import Region
from magis.fission.suffix import Axis, axes, places, suffix
from magis.ir import Graph
from magis.search.driver import DEFAULT_BUDGET
from magis.search.judge import Goal
from magis.search.levels import UNLIMITED, Level, Solution, bound, fastest_ns, level, solve
from magis.simulate.compile import Compiled, Costs

PARTS = (2, 4, 8, 16, 32)
PLACES = 8
QUICK = 2000
SCREENING = 10
"""Times the budget, in states, after which no further configuration is tried."""
FINALISTS = 3
COARSE = 30
"""Under a latency limit peaks are compared to this share of them, while many configurations are tried."""
SQUEEZES = 5
"""Attempts to get below the peak of a finalist, by ever smaller steps."""


@dataclass(frozen=True)
class Cut:
    """From which position of the forward pass on, and into how many parts."""

    at: int
    parts: int


@dataclass(frozen=True, eq=False)
class Divided:
    """A planned step with loops."""

    cuts: tuple[Cut, ...]
    level: Level
    solution: Solution
    states: int = 0


def divide(
    graph: Graph,
    costs: Costs,
    goal: Goal,
    *,
    reuse: bool,
    seed: int,
    budget: int = DEFAULT_BUDGET,
    known: tuple[int, int] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> Divided | None:
    """The best divided step under the goal; None if nothing can be cut, or only into steps that are no better than
    the ``known`` plan (its peak in bytes and its latency in ns).

    ``graph`` must be in functional form and free of needless constraints (``rewrite.untangle``). ``budget`` is the
    number of states that the search of a step without loops looks at; configurations together get a few times as many.
    Nothing further is tried once ``over`` says so.
    """
    search = _Search(graph, costs, goal, reuse=reuse, seed=seed, budget=budget, known=known, over=over)
    search.screen()
    return search.finish()


def replan(
    found: Divided,
    costs: Costs,
    goal: Goal,
    *,
    reuse: bool,
    seed: int,
    budget: int = DEFAULT_BUDGET,
    over: Callable[[], bool] = lambda: False,
) -> Divided:
    """The same configuration planned with other costs, or under another goal."""
    here = level(found.level.compiled.graph, costs, reuse=reuse)
    graph = found.level.compiled.graph
    search = _Search(graph, costs, goal, reuse=reuse, seed=seed, budget=budget, known=None, over=over)
    start = replace(found, level=here)
    if goal.memory_limit is None:
        start = replace(start, solution=search.quickly(here))
    return replace(start, solution=search.thoroughly(start), states=search.states)


def numbers_of_parts(most: int) -> list[int]:
    """Divisors of ``most`` to try, from few to many: powers of two, or others where there are few of these."""
    even = [parts for parts in PARTS if most % parts == 0]
    return even if len(even) > 1 else [parts for parts in range(2, PARTS[-1] + 1) if most % parts == 0]


class _Search:
    """Every configuration quickly, the best of them thoroughly."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        goal: Goal,
        *,
        reuse: bool,
        seed: int,
        budget: int,
        known: tuple[int, int] | None,
        over: Callable[[], bool],
    ) -> None:
        self.graph, self.costs, self.goal, self.reuse, self.seed = graph, costs, goal, reuse, seed
        self.known, self.over = known, over
        self.screening = SCREENING * budget
        self.thorough = max(1, budget // 4)
        self.found: list[Divided] = []
        self.states = 0

    def screen(self) -> None:
        """Judge every configuration by a quick plan."""
        for axis in axes(self.graph):
            found = places(self.graph, axis, PLACES)
            # Under a memory limit small regions are fast, under a latency limit large ones are lean: whatever comes
            # first saves looking closely at the rest.
            for at in reversed(found) if self.goal.memory_limit is not None else found:
                for divided in self._parts(axis, at):
                    self.found.append(divided)

    def _parts(self, axis: Axis, at: int) -> Iterator[Divided]:
        """Few parts first, until more of them cannot help."""
        cuts = suffix(self.graph, axis, at).cuts
        if not cuts:
            return
        cuts = connected(self.graph, cuts, 1)[0].cuts
        most = most_parts(cuts)
        known: Compiled | None = None
        for parts in numbers_of_parts(most):
            try:
                looped = expand(self.graph, Region(cuts, parts), in_place=True)
            except VerifyError:
                return  # no legal region (``fission.blocked`` says why), or a kernel refuses the size of a part
            here = level(looped, self.costs, reuse=self.reuse, known=known)
            known = here.compiled
            if self._hopeless(here) or self.states > self.screening or self.over():
                return
            solution = self.quickly(here)
            yield Divided((Cut(at, parts),), here, solution)
            limit = self.goal.memory_limit
            free = solution.latency_ns == fastest_ns(here)
            if limit is not None and solution.peak <= limit and free:
                return

    def _hopeless(self, here: Level) -> bool:
        """Whether even without recomputation this one is no better than the best so far."""
        limit = self.goal.memory_limit
        if limit is None:
            return fastest_ns(here) > self._allowed()
        within = [latency_ns for peak, latency_ns in self._plans() if peak <= limit]
        return bool(within) and (bound(here) > limit or fastest_ns(here) >= min(within))

    def _plans(self) -> list[tuple[int, int]]:
        """Peak and latency of every plan so far."""
        known = [] if self.known is None else [self.known]
        return known + [(each.solution.peak, each.solution.latency_ns) for each in self.found]

    def _key(self, divided: Divided) -> tuple[int, int]:
        return self.goal.key(divided.solution.peak, divided.solution.latency_ns)

    def quickly(self, here: Level) -> Solution:
        """A plan for one configuration, good enough to compare it with others."""
        if self.goal.memory_limit is not None:
            return self._within(here, self.goal)
        best = self._within(here, Goal(memory_limit=UNLIMITED))
        low, high = bound(here), best.peak
        known = min((peak for peak, latency_ns in self._plans() if latency_ns <= self._allowed()), default=high)
        if known < high:  # no use unless it can beat what there is
            best = self._closer(here, best, known)
            high = best.peak if best.peak <= known else low
        while high - low > high // COARSE and not self.over():
            limit = (low + high) // 2
            tried = self._closer(here, best, limit)
            if tried.peak <= limit:
                best, high = tried, tried.peak
            else:
                low = limit
        return best

    def thoroughly(self, divided: Divided) -> Solution:
        """The best plan for a configuration."""
        if self.goal.memory_limit is not None:
            return self._within(divided.level, self.goal, self.thorough)
        best = divided.solution
        step = best.peak // COARSE
        for _ in range(0 if self.over() else SQUEEZES):
            tried = self._closer(divided.level, best, best.peak - step, self.thorough)
            step = step if tried.peak < best.peak else step // 2
            best = tried
        return best

    def _closer(self, here: Level, best: Solution, limit: int, budget: int | None = None) -> Solution:
        """A plan within the memory limit, or near it, if it is better than the best."""
        tried = self._within(here, Goal(memory_limit=limit), budget)
        better = self._in_time(tried) and tried.peak < best.peak
        return tried if better else best

    def _in_time(self, solution: Solution) -> bool:
        return solution.latency_ns <= self._allowed()

    def _allowed(self) -> int:
        return self.goal.latency_limit_ns or 0

    def _within(self, here: Level, goal: Goal, budget: int | None = None) -> Solution:
        """A plan by a search of so many states; by a brief one where none are given."""
        solution = solve(here, goal, QUICK if budget is None else budget, self.seed, brief=budget is None)
        self.states += solution.states
        return solution

    def finish(self) -> Divided | None:
        """The best configurations again, thoroughly."""
        finalists = sorted(self.found, key=self._key)[: FINALISTS if self.goal.memory_limit is not None else 1]
        for divided in finalists if not self.over() else ():
            solution = self.thoroughly(divided)
            self.found.append(replace(divided, solution=solution))
        best = min(self.found, key=self._key, default=None)
        if best is None or (self.known is not None and self._key(best) >= self.goal.key(*self.known)):
            return None
        return replace(best, states=self.states)
