"""Moves of all storages alike at once: the layers of a deep network have storages of equal sizes in equal places.

A move in one layer does not lower a peak that other layers reach, too, so a search over single storages is lost in a
network of many layers; and it takes as many steps as there are layers. Here a move flags one storage of every layer.
Storages are alike if their surroundings are: bytes and times of the operators next to them, of those next to these,
and so on (color refinement, Weisfeiler and Leman 1968). Nothing is assumed of them: the exact evaluator judges each
plan, and searches over single storages follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective
from magis.search.moves import alternatives, hot
from magis.simulate.problem import Int64s, Problem

RADII = (1, 2, 3)
"""Radii of the surroundings that are compared, coarse moves first."""
LAYERS = 4
"""Least number of storages alike that make a network deep."""
CLIMB = 2_000
"""Most states of a climb, whatever the depth: as many as most climbs need."""
SHAKE, SHAKEN, FLIPS = 4_000, 2, 2
"""States of a shake, radius of its moves, and groups that are flipped before each climb."""
SMALL = 200
"""Reciprocal of the size, as a fraction of the largest storage's, below which storages are not worth a move."""


def alike(problem: Problem, radius: int = RADII[-1]) -> list[list[Int64s]]:
    """Group storages whose surroundings are equal up to 0, 1, ... ``radius`` operators away, by first storage."""
    nodes, storages = range(problem.n_nodes), range(problem.n_storages)
    inputs = [problem.inputs(node).tolist() for node in nodes]
    outputs = [problem.outputs(node).tolist() for node in nodes]
    reading, makers = problem.inputs.turned(problem.n_storages), problem.producer.tolist()
    readers = [reading(storage).tolist() for storage in storages]

    def colors(of: list[int], items: list[int]) -> tuple[int, ...]:
        return tuple(sorted(of[item] for item in items))

    color, of_node = _numbered(problem.nbytes.tolist()), _numbered(problem.node_ns.tolist())
    found = [_members(color)]
    for _ in range(radius):
        of_node = _numbered((of_node[n], colors(color, inputs[n]), colors(color, outputs[n])) for n in nodes)
        color = _numbered((color[s], of_node[makers[s]], colors(of_node, readers[s])) for s in storages)
        found.append(_members(color))
    return found


def _numbered(keys: Iterable[object]) -> list[int]:
    """Number the keys, equal ones alike."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _members(color: Sequence[int]) -> list[Int64s]:
    """Group items by color."""
    members: dict[int, list[int]] = {}
    for item, each in enumerate(color):
        members.setdefault(each, []).append(item)
    return [np.array(each, dtype=np.int64) for each in members.values()]


@dataclass(frozen=True, eq=False)
class AlikeMoves:
    """The moves of storages alike in a deep network, which ``judge`` evaluates."""

    judge: BudgetedEvaluator
    groups: list[list[Int64s]]
    """Storages alike by radius."""
    allow_swap: bool

    def climb(self, goal: Objective, plan: JudgedPlan, states: int) -> JudgedPlan:
        """Improve a plan by hill climbing, from coarse moves to fine ones, in two ways with about so many new states
        together: from small storages to large ones, which are swapped if that is enough, and from large ones to small
        ones, which are recomputed. Each is better in some networks. Returns the better plan."""
        nbytes, found = self.judge.problem.nbytes, []
        choices = [self._choices(plan, radius) for radius in RADII]
        for small_first in (True, False):
            climbed, stop = plan, self.judge.states + states // 2
            for groups in choices:
                ordered = sorted(groups, key=lambda choice: int(nbytes[choice[0][0]]), reverse=not small_first)
                moves = [(group, flag) for group, flags in ordered for flag in flags[:: -1 if small_first else 1]]
                climbed = self._climb(goal, climbed, moves, stop)
            found.append(climbed)
        return min(found, key=lambda each: each.key(goal))

    def shake(self, goal: Objective, plan: JudgedPlan, states: int, seed: int) -> JudgedPlan:
        """Leave the local optimum of a climb, for about so many new states: flip some groups at the peak, climb from
        there in random order, and go on from the best plan (iterated local search)."""
        judge, random = self.judge, np.random.Generator(np.random.PCG64(seed))
        moves = [(group, flag) for group, flags in self._choices(plan, SHAKEN) for flag in flags]
        stop, before = judge.states + states, -1
        while before < judge.states < stop:  # the latter: until nothing new is left
            before = judge.states
            judge.look(plan.flags)
            at_peak = hot(judge.evaluator)
            pool = [move for move in moves if at_peak[move[0]].any()]
            flags = plan.flags.copy()
            for choice in random.permutation(len(pool))[:FLIPS].tolist():
                group, flag = pool[choice]
                flags[group] = flag
            shuffled = [moves[at] for at in random.permutation(len(moves)).tolist()]
            found = self._climb(goal, judge.plan(flags), shuffled, stop)
            plan = min(plan, found, key=lambda each: each.key(goal))
        return plan

    def _choices(self, plan: JudgedPlan, radius: int) -> list[tuple[Int64s, list[int]]]:
        """List groups of storages that are large enough, and the flags that change them, on the order of a plan."""
        self.judge.use(plan.order)
        evaluator, nbytes = self.judge.evaluator, self.judge.problem.nbytes
        groups = (group for group in self.groups[radius] if SMALL * nbytes[group[0]] >= nbytes.max())
        return [(each, alternatives(evaluator, int(each[0]), -1, allow_swap=self.allow_swap)) for each in groups]

    def _climb(self, goal: Objective, plan: JudgedPlan, moves: Sequence[tuple[Int64s, int]], stop: int) -> JudgedPlan:
        """Take every move that improves a plan, in turns until none does or ``stop`` states are evaluated."""
        better = True
        while better:
            better = False
            for group, flag in moves:
                if self.judge.states >= stop:
                    return plan
                flags = plan.flags.copy()
                flags[group] = flag
                found = self.judge.cost(flags)
                if goal.key(*found) < plan.key(goal):
                    plan, better = JudgedPlan(plan.order, flags, *found), True
        return plan


def alike_moves(judge: BudgetedEvaluator, *, allow_swap: bool) -> AlikeMoves | None:
    """Return the moves of storages alike; None unless most bytes are in storages that are alike in several layers."""
    groups, nbytes = alike(judge.problem), judge.problem.nbytes
    repeated = sum(int(nbytes[group].sum()) for group in groups[-1] if len(group) >= LAYERS)
    return AlikeMoves(judge, groups, allow_swap) if 2 * repeated > int(nbytes.sum()) else None
