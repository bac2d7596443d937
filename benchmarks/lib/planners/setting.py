"""The step as other planners see it: modules, forward and backward pass, what is saved from one for the other.

All peers are judged by the exact evaluator on one problem in program order. What this gives them for free, compared
with their own runtimes: weights are updated as soon as their gradients exist, operators run in place where they may,
nothing is recomputed before it is needed or without being needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from magis.search.budgeted_evaluator import JudgedPlan, Objective
from magis.search.lagrangian_min_cut import levels_by_position
from magis.simulate.compiled_problem import Compiled
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, Bools, Int8s, Int64s, Problem

__all__ = ["Calibrated", "Origins", "Setting", "origins"]

BUDGETS = 24
"""Of its own that a peer is asked for, from the loosest to the tightest one that it can keep."""
REFINEMENTS = 6
"""Further budgets, between the last one whose plan meets a goal and the next."""


@dataclass(frozen=True, eq=False)
class Origins:
    """Where the nodes of a problem come from."""

    paths: tuple[str, ...]
    """[n] path of the module that the node stems from; of a backward node, of the operator that it belongs to."""
    forward: Bools
    """[n] of the forward pass, the loss included."""
    random: Bools
    """[n]"""
    called: tuple[str, ...]
    """Paths of the modules that are called: no mere lists of modules."""
    blocks: tuple[str, ...]
    """Paths of the model's layers; none: not known."""


def origins(compiled: Compiled, called: Sequence[str], blocks: Sequence[str] = ()) -> Origins:
    """Where the nodes of a compiled graph come from."""
    return Origins(
        paths=tuple(group[0].module for group in compiled.nodes),
        forward=np.array([group[0].phase == "forward" for group in compiled.nodes], dtype=np.bool_),
        random=np.array([any(op.random for op in group) for group in compiled.nodes], dtype=np.bool_),
        called=tuple(called),
        blocks=tuple(blocks),
    )


def within(path: str, module: str) -> bool:
    """Whether a path is that of a module or of one inside it; "" is the whole model."""
    return module in ("", path) or path.startswith(module + ".")


class Setting:
    """A problem in program order, and the plan that recomputes nothing."""

    def __init__(self, problem: Problem, found: Origins) -> None:
        self.problem = problem
        self.origins = found
        self.evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
        self.untouched: Int8s = np.full(problem.n_storages, DROP, dtype=np.int8)

    @cached_property
    def levels(self) -> Int64s:
        """[n] bytes at the worst moment of each node and the updates behind it, with nothing recomputed."""
        self.evaluator.quick(self.untouched)
        return levels_by_position(self.evaluator)

    @cached_property
    def saved(self) -> Bools:
        """[s] activations: made by the forward pass, idle from there until the backward pass reads them."""
        gaps, forward = self.evaluator.gaps, self.origins.forward
        idle: Bools = (gaps.start >= 0) & forward[self.problem.producer]
        idle &= forward[np.maximum(gaps.start, 0)] & ~forward[np.maximum(gaps.end, 0)]
        return idle

    @property
    def peak(self) -> int:
        """Bytes, with nothing recomputed."""
        return int(self.levels.max(initial=self.problem.persistent_bytes))

    def idle(self, position: int) -> Bools:
        """[s] activations that no node around the position touches."""
        gaps = self.evaluator.gaps
        lying: Bools = self.saved & (gaps.start < position) & (position < gaps.end)
        return lying

    def budget(self, least: float, tight: float) -> float:
        """Bytes between the peak (tight: 0) and the least that a model can keep (1), with room for rounding."""
        return (self.peak + (least - self.peak) * tight) * (1.0 + 1e-9) + 1.0

    def judged(self, flags: Int8s) -> JudgedPlan:
        return JudgedPlan(self.evaluator.order, flags, *self.evaluator.quick(flags))


class Calibrated:
    """A peer's plans at budgets of its own, each judged exactly, and the best of them for any goal.

    ``plans_at`` takes how tight the budget is: 0 for the peak without recomputation, 1 for the least bytes that the
    peer's own model can keep. No peer knows the evaluator's bytes, so that none of its budgets is the limit that is
    asked for. It may try them all: that flatters it, who would have to take the plan that its own model believes in.
    """

    def __init__(self, setting: Setting, plans_at: Callable[[float], Iterable[Int8s]]) -> None:
        self.setting = setting
        self._plans_at = plans_at
        self._known: dict[float, list[JudgedPlan]] = {}

    def best(self, goal: Objective) -> JudgedPlan | None:
        """The best plan that meets the goal; None if none does."""
        found = [self.setting.judged(self.setting.untouched)]
        tried = [(tight, self._met(tight, goal, found)) for tight in np.linspace(0.0, 1.0, BUDGETS).tolist()]
        for (loose, first), (tight, second) in itertools.pairwise(tried):
            if first != second:
                self._refine(loose, tight, goal, found)
        return min((plan for plan in found if plan.met(goal)), key=lambda plan: plan.key(goal), default=None)

    def _met(self, tight: float, goal: Objective, found: list[JudgedPlan]) -> bool:
        """Whether a plan of this budget meets the goal; all of them join ``found``."""
        if tight not in self._known:
            self._known[tight] = [self.setting.judged(flags) for flags in self._plans_at(tight)]
        found += self._known[tight]
        return any(plan.met(goal) for plan in self._known[tight])

    def _refine(self, loose: float, tight: float, goal: Objective, found: list[JudgedPlan]) -> None:
        """Budgets between two of which one meets the goal."""
        first = self._met(loose, goal, found)
        for _ in range(REFINEMENTS):
            middle = (loose + tight) / 2
            if self._met(middle, goal, found) == first:
                loose = middle
            else:
                tight = middle
