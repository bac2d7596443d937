"""Threshold annealing on single flags and pairs of flags, with the exact evaluator."""

from __future__ import annotations

import numpy as np

from magis.search.judge import Goal, Judge, Plan
from magis.search.moves import alternatives
from magis.simulate.problem import Int64s

__all__ = ["anneal"]

PAIRS = 0.6  # share of steps that change two storages at once: one leaves, one returns

STALE = 300  # steps in a row that met only plans seen before: the neighbourhood is used up


def anneal(judge: Judge, goal: Goal, plan: Plan, states: int, *, seed: int, allow_swap: bool) -> None:
    """Walk from a plan for so many new states; the judge keeps the best.

    The walk may break the limit, at a price; it accepts what is worse by less than a threshold that sinks to
    nothing. Integers and one seeded generator, so it repeats.
    """
    judge.use(plan.order)
    evaluator = judge.evaluator
    movable = np.flatnonzero((evaluator.step.redoable | evaluator.step.swappable) & _worth_moving(judge))
    options = {storage: alternatives(evaluator, storage, -1, allow_swap=allow_swap) for storage in movable.tolist()}
    choices = [storage for storage, flags in options.items() if len(flags) > 1]
    if not choices:
        return
    price = _Price(judge, goal, plan)
    random = np.random.Generator(np.random.PCG64(seed))
    flags = plan.flags.copy()
    value = price.value(plan.peak, plan.latency_ns)
    start, stop = judge.states, judge.states + states
    stale = 0
    while judge.states < stop and stale < STALE:
        known = judge.states
        threshold = price.step * (stop - judge.states) // (stop - start)
        before: list[tuple[int, int]] = []
        for _ in range(2 if random.random() < PAIRS else 1):
            storage = choices[int(random.integers(len(choices)))]
            before.append((storage, int(flags[storage])))
            others = [flag for flag in options[storage] if flag != flags[storage]]
            flags[storage] = others[int(random.integers(len(others)))]
        found = price.value(*judge.cost(flags))
        stale = stale + 1 if judge.states == known else 0
        if found <= value + threshold:
            value = found
        else:
            for storage, flag in reversed(before):
                flags[storage] = flag


def _worth_moving(judge: Judge) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[s] storages of at least a thousandth of what all temporary ones could save together on average."""
    nbytes: Int64s = judge.problem.nbytes
    worth: np.ndarray[tuple[int], np.dtype[np.bool_]] = nbytes * 1000 >= nbytes.max(initial=0)
    return worth


class _Price:
    """One number for a plan: what the goal minimizes, plus the excess over the limit at a price.

    Within the limit the price is twice the mean one of what was saved so far. Above it the excess comes first: an
    excess of a 64th of the whole is as bad as a whole step (or peak) more.
    """

    def __init__(self, judge: Judge, goal: Goal, plan: Plan) -> None:
        problem = judge.problem
        latency = max(1, int(problem.node_ns.sum() + problem.blk_ns.sum()))
        peak = max(1, plan.peak - problem.persistent_bytes)
        spent = max(plan.latency_ns - latency, latency // 100, 1)
        by_memory = goal.memory_limit is not None
        self._goal = goal
        if plan.met(goal):
            self._num, self._den = (2 * spent, peak) if by_memory else (2 * peak, spent)
            self.step = max(1, (spent if by_memory else peak) // 100)
        else:
            self._num, self._den = (latency, 1 + peak // 64) if by_memory else (peak, 1 + latency // 64)
            self.step = max(1, (latency if by_memory else peak) // 4)

    def value(self, peak: int, latency_ns: int) -> int:
        if self._goal.memory_limit is not None:
            return latency_ns + max(0, peak - self._goal.memory_limit) * self._num // self._den
        return peak + max(0, latency_ns - (self._goal.latency_limit_ns or 0)) * self._num // self._den
