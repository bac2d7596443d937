"""The goal of a search, and an evaluator with a budget of states that caches evaluated plans and keeps the best."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from magis.errors import UsageError
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, Int8s, Int32s, Problem

Watch = Callable[[int, int], None]
"""Callback with the peak (bytes) and the latency (ns) of every evaluated plan."""
DEFAULT_BUDGET = 30_000
"""States evaluated: about 1 s for 500 nodes, 3 s for 1500; fewer for larger steps (`affordable`)."""
LARGE = 1500
"""Nodes above which a search evaluates fewer states, since the time per state grows with the nodes."""
LEAST_SHARE = 8
"""Reciprocal of the least share of its states that a search evaluates on a large step."""
FREE = 2000
"""Reciprocal of the share of the lowest possible latency that counts as no extra time."""


def affordable(states: int, nodes: int) -> int:
    """Return the states of a search; above ``LARGE`` nodes fewer, down to 1 / ``LEAST_SHARE`` of them."""
    return max(1, states * LARGE // min(max(nodes, LARGE), LEAST_SHARE * LARGE))


def free_of_cost(latency_ns: int, least_ns: int) -> bool:
    """Return True if a plan's latency exceeds the lowest possible one so little that more search is not worthwhile."""
    return FREE * (latency_ns - least_ns) <= least_ns


Over = Callable[[], bool]
"""Callback before every state but the first; True ends the search with the best plan so far."""


def never() -> bool:
    """Return False: only the budget ends the search."""
    return False


class Deadline:
    """A time limit in seconds for consecutive searches, starting now; None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._began = time.perf_counter()

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._began

    def over(self, share: float = 1.0) -> bool:
        """Return True once this share of the time limit has passed."""
        return self.seconds is not None and self.elapsed() >= share * self.seconds

    def left(self) -> float | None:
        """Return the seconds left, at least 0; None without a limit."""
        return None if self.seconds is None else max(self.seconds - self.elapsed(), 0.0)

    def begin(self, share: float) -> Over:
        """Return a callback that ends a search at a share of the limit, but not before a tenth of the limit has
        passed."""
        if self.seconds is None:
            return never
        end = max(share * self.seconds, self.elapsed() + self.seconds / 10)
        return lambda: self.elapsed() >= end


NO_DEADLINE = Deadline(None)


class SearchOver(Exception):  # noqa: N818 (ends a search whose best plan stands; nothing went wrong)
    """The search ends: the budget is spent, the time is up, or the best plan is good enough."""


@dataclass(frozen=True)
class Objective:
    """A limit of memory (bytes) or of latency (ns); exactly one of them is given."""

    memory_limit: int | None = None
    latency_limit_ns: int | None = None

    def key(self, peak: int, latency_ns: int) -> tuple[int, int]:
        """Return the sort key of a plan, best first (paper, Algorithm 3): excess over the limit, then the other
        cost."""
        if self.memory_limit is not None:
            return max(peak, self.memory_limit), latency_ns
        return max(latency_ns, self.latency_limit_ns or 0), peak

    def met(self, peak: int, latency_ns: int) -> bool:
        """Return True if a plan with these costs keeps the limit."""
        if self.memory_limit is not None:
            return peak <= self.memory_limit
        return latency_ns <= (self.latency_limit_ns or 0)


def check_request(goal: Objective, budget: int) -> None:
    """Raise UsageError unless exactly one limit is given and the budget is positive."""
    if (goal.memory_limit is None) == (goal.latency_limit_ns is None):
        raise UsageError("a search needs a memory limit or a latency limit, and not both")
    if budget < 1:
        raise UsageError(f"a search needs a budget of at least 1 state, not {budget}")


@dataclass(frozen=True)
class PlanRequest:
    """A goal and a budget of states per search of a step without loops; ``over`` ends the search early."""

    goal: Objective
    seed: int
    budget: int = DEFAULT_BUDGET
    over: Over = never
    eager_ns: int = 0
    """Eager's latency in ns: within a memory limit, a search ends at a plan about as fast."""

    def enough(self, peak: int, latency_ns: int) -> bool:
        """Return True if a plan keeps the memory limit and takes no extra time."""
        if self.goal.memory_limit is None:
            return False
        return self.goal.met(peak, latency_ns) and free_of_cost(latency_ns, self.eager_ns)

    def key(self, peak: int, latency_ns: int) -> tuple[int, int]:
        return self.goal.key(peak, latency_ns)


@dataclass(frozen=True, eq=False)
class JudgedPlan:
    """An evaluated plan: peak in bytes, latency in ns."""

    order: Int32s
    flags: Int8s
    peak: int
    latency_ns: int

    def key(self, goal: Objective) -> tuple[int, int]:
        return goal.key(self.peak, self.latency_ns)

    def met(self, goal: Objective) -> bool:
        return goal.met(self.peak, self.latency_ns)


class BudgetedEvaluator:
    """Evaluates plans, each only once, within a budget of states; keeps the best by the goal's key.

    Plans are evaluated on the order given to the last ``use``. A plan within the memory limit without extra time ends
    the search. ``over`` can end it, too, but not before the first plan; ``stopped_by_seconds`` is then True, and the
    result depends on the machine's speed. Otherwise results are deterministic.
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
        """Flags of the plan without recomputation."""
        self._seen: dict[bytes, tuple[int, int]] = {}
        self._orders = {self.evaluator.order.tobytes(): (self.evaluator, self._seen)}

    def use(self, order: Int32s) -> None:
        """Set the order on which plans are evaluated."""
        digest = order.tobytes()
        if digest not in self._orders:
            self._orders[digest] = (Evaluator(self.problem, order, self.evaluator.step), {})
        self.evaluator, self._seen = self._orders[digest]

    def cost(self, flags: Int8s) -> tuple[int, int]:
        """Return peak and latency of a plan. Raises SearchOver instead of evaluating a new state beyond the budget."""
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
        """Evaluate flags and return them as a plan, copied."""
        return JudgedPlan(self.evaluator.order, flags.copy(), *self.cost(flags))

    def look(self, flags: Int8s) -> tuple[int, int]:
        """Return peak and latency of a plan, and leave its details (runs, levels, lifetimes) in ``evaluator``."""
        before = self.states
        found = self.cost(flags)
        if self.states == before:
            self.evaluator.quick(flags)
        return found

    def front(self) -> list[JudgedPlan]:
        """Return the evaluated plans that no other one dominates, by increasing peak."""
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
