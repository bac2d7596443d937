"""Moves of all storages alike at once: the layers of a deep network have storages of equal sizes in equal places.

A move in one layer does not lower a peak that other layers reach, too, so a search over single storages is lost in a
network of many layers; and it takes as many steps as there are layers. Here a move flags one storage of every layer.
Storages are alike if their surroundings are: bytes and times of the operators next to them, of those next to these,
and so on (color refinement, Weisfeiler and Leman 1968). Nothing is assumed of them: the exact evaluator judges each
plan, and searches over single storages follow.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective
from magis.search.moves import alternatives
from magis.simulate.problem import Int64s, Problem

RADII = (1, 2, 3)
"""Radii of the surroundings that are compared, coarse moves first."""
LAYERS = 4
"""Least number of storages alike that make a network deep."""
SMALL = 200
"""Reciprocal of the size, as a fraction of the largest storage's, below which storages are not worth a move."""


def alike(problem: Problem, radius: int) -> list[Int64s]:
    """Group storages whose surroundings are equal up to so many operators away, by first storage."""
    nodes, storages = range(problem.n_nodes), range(problem.n_storages)
    inputs = [problem.inputs(node).tolist() for node in nodes]
    outputs = [problem.outputs(node).tolist() for node in nodes]
    makers = problem.producer.tolist()
    readers: list[list[int]] = [[] for _ in storages]
    for node in nodes:
        for storage in inputs[node]:
            readers[storage].append(node)

    def colors(of: list[int], items: list[int]) -> tuple[int, ...]:
        return tuple(sorted(of[item] for item in items))

    color, of_node = _numbered(problem.nbytes.tolist()), _numbered(problem.node_ns.tolist())
    for _ in range(radius):
        of_node = _numbered(
            (of_node[node], colors(color, inputs[node]), colors(color, outputs[node])) for node in nodes
        )
        color = _numbered((color[s], of_node[makers[s]], colors(of_node, readers[s])) for s in storages)
    members: dict[int, list[int]] = {}
    for storage in storages:
        members.setdefault(color[storage], []).append(storage)
    return [np.array(each, dtype=np.int64) for each in members.values()]


def _numbered(keys: Iterable[object]) -> list[int]:
    """Number the keys, equal ones alike."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def is_deep(problem: Problem) -> bool:
    """Return True if most bytes are in storages that are alike in several layers."""
    groups = alike(problem, RADII[-1]) if problem.n_storages else []
    repeated = sum(int(problem.nbytes[group].sum()) for group in groups if len(group) >= LAYERS)
    return 2 * repeated > int(problem.nbytes.sum())


def climb_alike(
    judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan, *, allow_swap: bool, states: int
) -> JudgedPlan:
    """Improve a plan by hill climbing over groups of storages alike, in two ways with about so many new states
    together: from small storages to large ones, which are swapped if that is enough, and from large ones to small
    ones, which are recomputed. Each is better in some networks. Returns the better plan."""
    found = [
        _climbed(judge, goal, plan, allow_swap=allow_swap, states=states // 2, small_first=small_first)
        for small_first in (True, False)
    ]
    return min(found, key=lambda each: each.key(goal))


def _climbed(
    judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan, *, allow_swap: bool, states: int, small_first: bool
) -> JudgedPlan:
    """Climb from coarse to fine moves, groups by size, and take every better plan at once."""
    judge.use(plan.order)
    evaluator, nbytes = judge.evaluator, judge.problem.nbytes
    stop = judge.states + states
    for radius in RADII:
        groups = [group for group in alike(judge.problem, radius) if SMALL * nbytes[group[0]] >= nbytes.max()]
        groups.sort(key=lambda group: int(nbytes[group[0]]), reverse=not small_first)
        moves = [
            (group, flag)
            for group in groups
            for flag in alternatives(evaluator, int(group[0]), -1, allow_swap=allow_swap)[:: -1 if small_first else 1]
        ]
        better = True
        while better:
            better = False
            for group, flag in moves:
                if judge.states >= stop:
                    return plan
                trial = plan.flags.copy()
                trial[group] = flag
                found = judge.cost(trial)
                if goal.key(*found) < plan.key(goal):
                    plan, better = JudgedPlan(plan.order, trial, *found), True
    return plan
