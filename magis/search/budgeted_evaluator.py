"""The goal of a search, and its records: states evaluated, plans seen, the best so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from magis.errors import UsageError
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, Int8s, Int32s, Problem

Watch = Callable[[int, int], None]
"""Called with the peak (bytes) and the latency (ns) of each plan as it is judged."""
DEFAULT_BUDGET = 30_000
"""States evaluated: about 1 s for 500 nodes, 3 s for 1500; of larger steps fewer (`affordable`)."""
LARGE = 1500
"""Nodes from which on a search evaluates fewer states: the time of one grows with the nodes."""
LEAST_SHARE = 8
"""Share of its states that a search of any step may evaluate (the reciprocal)."""
FREE = 2000
"""A plan that costs no more than this share (the reciprocal) of the least latency costs nothing."""


def affordable(states: int, nodes: int) -> int:
    """Return the states of a search, fewer for large steps: states times nodes stay the same, down to a least share."""
    return max(1, states * LARGE // min(max(nodes, LARGE), LEAST_SHARE * LARGE))


def free_of_cost(latency_ns: int, least_ns: int) -> bool:
    """Return True if a plan is so little slower than the fastest possible one that no search should go on for it."""
    return FREE * (latency_ns - least_ns) <= least_ns


Over = Callable[[], bool]
"""Called before every state but the first; True ends the search with the best plan so far."""


def never() -> bool:
    """Let the search end by its budget alone."""
    return False


class Deadline:
    """A cap on the seconds of searches that follow one another, from now on; None: they end by their budgets alone."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._began = time.perf_counter()

    def elapsed(self) -> float:
        """Return the seconds since it was made."""
        return time.perf_counter() - self._began

    def over(self, share: float = 1.0) -> bool:
        """Return True once this share of the cap has gone by."""
        return self.seconds is not None and self.elapsed() >= share * self.seconds

    def left(self, least: float = 0.0) -> float | None:
        """Return the seconds that are left, ``least`` as a share of all of them or more."""
        return None if self.seconds is None else max(self.seconds - self.elapsed(), least * self.seconds)

    def begin(self, share: float) -> Over:
        """Return the end of a search that begins now: that share of the cap, or a tenth of it from now on if later."""
        if self.seconds is None:
            return never
        end = max(share * self.seconds, self.elapsed() + self.seconds / 10)
        return lambda: self.elapsed() >= end


NO_DEADLINE = Deadline(None)


class SearchOver(Exception):  # noqa: N818 (ends a search whose best plan stands; nothing went wrong)
    """The budget is spent."""


@dataclass(frozen=True)
class Objective:
    """A limit of memory (bytes) or of latency (ns); exactly one of them is given."""

    memory_limit: int | None = None
    latency_limit_ns: int | None = None

    def key(self, peak: int, latency_ns: int) -> tuple[int, int]:
        """Return the key that orders plans, best first (paper, Algorithm 3): excess over the limit, then the other
        quantity."""
        if self.memory_limit is not None:
            return max(peak, self.memory_limit), latency_ns
        return max(latency_ns, self.latency_limit_ns or 0), peak

    def met(self, peak: int, latency_ns: int) -> bool:
        """Return True if the limit is kept."""
        if self.memory_limit is not None:
            return peak <= self.memory_limit
        return latency_ns <= (self.latency_limit_ns or 0)


def check_request(goal: Objective, budget: int) -> None:
    """Raise UsageError unless a search has exactly one limit, and states to evaluate."""
    if (goal.memory_limit is None) == (goal.latency_limit_ns is None):
        raise UsageError("a search needs a memory limit or a latency limit, and not both")
    if budget < 1:
        raise UsageError(f"a search needs a budget of at least 1 state, not {budget}")


@dataclass(frozen=True)
class PlanRequest:
    """A goal and its budget: states of the search of a step without loops; ``over`` ends it early."""

    goal: Objective
    seed: int
    budget: int = DEFAULT_BUDGET
    over: Over = never
    eager_ns: int = 0
    """Latency that costs nothing: within a memory limit the search does not go on for less."""

    def enough(self, peak: int, latency_ns: int) -> bool:
        """Return True if a plan is within the memory limit and costs no time."""
        if self.goal.memory_limit is None:
            return False
        return self.goal.met(peak, latency_ns) and free_of_cost(latency_ns, self.eager_ns)

    def key(self, peak: int, latency_ns: int) -> tuple[int, int]:
        return self.goal.key(peak, latency_ns)


@dataclass(frozen=True, eq=False)
class JudgedPlan:
    """A judged plan: peak in bytes, latency in nanoseconds."""

    order: Int32s
    flags: Int8s
    peak: int
    latency_ns: int

    def key(self, goal: Objective) -> tuple[int, int]:
        return goal.key(self.peak, self.latency_ns)

    def met(self, goal: Objective) -> bool:
        return goal.met(self.peak, self.latency_ns)


class BudgetedEvaluator:
    """Evaluates plans, each only once, within a budget of states; remembers the best by the goal's key.

    Plans are judged on the order of the last ``use``. A plan within the memory limit that costs no time ends the
    search. ``over`` is a further cap, though never on the first plan: where it ends the search,
    ``stopped_by_seconds`` says so, and the result depends on the machine's speed.
    Without it the same calls give the same answers everywhere.
    """

    def __init__(
        self,
        problem: Problem,
        goal: Objective,
        budget: int,
        over: Over = never,
        watch: Watch | None = None,
    ) -> None:
        self.problem = problem
        self.goal = goal
        self.budget = budget
        self.states = 0
        self.stopped_by_seconds = False
        self.best: JudgedPlan | None = None
        self._least_ns = problem.least_ns
        self._over = over
        self._watch = watch
        self.evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
        self.untouched = np.full(problem.n_storages, DROP, dtype=np.int8)
        """Flags of a plan that recomputes nothing."""
        self._seen: dict[bytes, tuple[int, int]] = {}
        self._orders = {self.evaluator.order.tobytes(): (self.evaluator, self._seen)}

    def use(self, order: Int32s) -> None:
        """Judge plans on this order from now on."""
        digest = order.tobytes()
        if digest not in self._orders:
            self._orders[digest] = (Evaluator(self.problem, order, self.evaluator.step), {})
        self.evaluator, self._seen = self._orders[digest]

    def cost(self, flags: Int8s) -> tuple[int, int]:
        """Return peak and latency of a plan. Raises SearchOver when a new state would exceed the budget."""
        digest = flags.tobytes()
        known = self._seen.get(digest)
        if known is not None:
            return known
        if self.states >= self.budget:
            raise SearchOver
        if self.states and self._over():
            self.stopped_by_seconds = True
            raise SearchOver
        self.states += 1
        found = self.evaluator.quick(flags)
        self._seen[digest] = found
        if self._watch is not None:
            self._watch(*found)
        if self.best is None or self.goal.key(*found) < self.best.key(self.goal):
            self.best = JudgedPlan(self.evaluator.order, flags.copy(), *found)
            within = self.goal.memory_limit is not None and self.goal.met(*found)
            if within and free_of_cost(found[1], self._least_ns):
                raise SearchOver
        return found

    def plan(self, flags: Int8s) -> JudgedPlan:
        """Judge a plan; the result has its own copy of the flags."""
        return JudgedPlan(self.evaluator.order, flags.copy(), *self.cost(flags))

    def look(self, flags: Int8s) -> tuple[int, int]:
        """Do the same as ``cost``, and let ``evaluator`` describe this plan."""
        before = self.states
        found = self.cost(flags)
        if self.states == before:
            self.evaluator.quick(flags)
        return found

    def front(self) -> list[JudgedPlan]:
        """Return the judged plans that no other one equals or beats in both costs, by rising peak."""
        every = [
            (*found, place, flags, evaluator.order)
            for place, (evaluator, seen) in enumerate(self._orders.values())
            for flags, found in seen.items()
        ]
        plans: list[JudgedPlan] = []
        for peak, latency_ns, _, flags, order in sorted(every, key=lambda entry: entry[:4]):
            if not plans or latency_ns < plans[-1].latency_ns:
                plans.append(JudgedPlan(order, np.frombuffer(flags, dtype=np.int8).copy(), peak, latency_ns))
        return plans
