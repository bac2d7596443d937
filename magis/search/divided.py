"""Fission in the search: where the step is cut into parts, into how many, and what is recomputed inside and outside.

A configuration is a list of places of the forward pass with numbers of parts: everything from a place to the loss and
back runs as a loop (``magis.fission.suffix``), later places as loops within the loops of earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from magis.errors import VerifyError
from magis.fission.expand import expand
from magis.fission.grow import connected, most_parts
from magis.fission.region import Region
from magis.fission.suffix import Axis, batch_axis, batch_inputs, places, suffix
from magis.ir import Graph
from magis.search.judge import Goal
from magis.search.levels import Level, Solution, bound, fastest_ns, level, solve
from magis.simulate.compile import Compiled, Costs

PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
PLACES = 8
QUICK = 400
THOROUGH = 8000
FINALISTS = 3
COARSE, FINE = 30, 200
"""Bisections of a memory limit end at this share of it, while many configurations are tried and at the end."""


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


def divide(graph: Graph, costs: Costs, goal: Goal, *, reuse: bool, seed: int) -> Divided | None:
    """The best divided step under the goal, None if nothing can be cut.

    ``graph`` must be in functional form and free of needless constraints (``rewrite.untangle``).
    """
    search = _Search(graph, costs, goal, reuse=reuse, seed=seed)
    search.screen()
    return search.finish()


class _Search:
    """Every configuration quickly, the best of them thoroughly."""

    def __init__(self, graph: Graph, costs: Costs, goal: Goal, *, reuse: bool, seed: int) -> None:
        self.graph, self.costs, self.goal, self.reuse, self.seed = graph, costs, goal, reuse, seed
        self.found: list[Divided] = []
        self.states = 0

    def screen(self) -> None:
        """Judge every configuration by a quick plan."""
        axis = batch_axis(self.graph, batch_inputs(self.graph))
        found = places(self.graph, axis, PLACES)
        # Under a memory limit small regions are fast, under a latency limit large ones are lean: whatever comes first
        # saves looking closely at the rest.
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
        for parts in PARTS:
            if most % parts:
                continue
            try:
                looped = expand(self.graph, Region(cuts, parts))
            except VerifyError:
                return  # a kernel refuses the size of a part
            here = level(looped, self.costs, reuse=self.reuse, known=known)
            known = here.compiled
            if self._hopeless(here):
                return
            solution = self._solve(here, QUICK, COARSE)
            yield Divided((Cut(at, parts),), here, solution)
            limit = self.goal.memory_limit
            free = solution.latency_ns == fastest_ns(here)
            if limit is not None and solution.peak <= limit and free:
                return

    def _hopeless(self, here: Level) -> bool:
        """Whether even without recomputation this one is no better than the best so far."""
        limit = self.goal.memory_limit
        if limit is None:
            return fastest_ns(here) > (self.goal.latency_limit_ns or 0)
        best = min((each.solution.latency_ns for each in self.found if each.solution.peak <= limit), default=None)
        return best is not None and fastest_ns(here) >= best

    def _key(self, divided: Divided) -> tuple[int, int]:
        return self.goal.key(divided.solution.peak, divided.solution.latency_ns)

    def _solve(self, here: Level, budget: int, share: int) -> Solution:
        if self.goal.memory_limit is not None:
            return self._within(here, self.goal, budget)
        best = self._within(here, Goal(memory_limit=1 << 62), budget)
        low, high = bound(here), best.peak
        known = min((each.solution.peak for each in self.found), default=high)
        if known < high:  # no use unless it can beat what there is
            best = self._closer(here, best, known, budget)
            high = min(high, known) if self._in_time(best) and best.peak <= known else low
        while high - low > high // share:
            limit = (low + high) // 2
            tried = self._closer(here, best, limit, budget)
            if tried.peak <= limit and self._in_time(tried):
                best, high = tried, tried.peak
            else:
                low = limit
        return best

    def _closer(self, here: Level, best: Solution, limit: int, budget: int) -> Solution:
        tried = self._within(here, Goal(memory_limit=limit), budget)
        better = self._in_time(tried) and tried.peak < best.peak
        return tried if better else best

    def _in_time(self, solution: Solution) -> bool:
        return solution.latency_ns <= (self.goal.latency_limit_ns or 0)

    def _within(self, here: Level, goal: Goal, budget: int) -> Solution:
        solution = solve(here, goal, budget, self.seed)
        self.states += solution.states
        return solution

    def finish(self) -> Divided | None:
        """The best configurations again, thoroughly."""
        finalists = sorted(self.found, key=self._key)[:FINALISTS]
        for divided in finalists:
            solution = self._solve(divided.level, THOROUGH, FINE)
            self.found.append(replace(divided, solution=solution))
        if not self.found:
            return None
        return replace(min(self.found, key=self._key), states=self.states)
