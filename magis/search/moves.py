"""Moves from plan to plan: one storage at a time, and groups of connected storages.

Dropping one storage often costs far too much, because its chain of inputs must be kept or recomputed as well. So plans
come from minimum cuts first; the moves here keep storages again as far as the limit allows (``climb``) or exchange
connected groups of decisions between a fast plan above the limit and a small one below (``relink``).
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective
from magis.search.window import window_orders
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, REPEAT, SWAP, Bools, Int8s, Int32s, Int64s, Problem


def alternatives(evaluator: Evaluator, storage: int, flag: int, *, allow_swap: bool) -> list[int]:
    """List the other flags of a storage that change the plan."""
    idle = evaluator.gaps.start[storage] >= 0
    flags = [KEEP]
    if evaluator.step.redoable[storage]:
        flags += [RECOMPUTE] if idle else []
        flags += [DROP]
    if allow_swap and idle and evaluator.step.swappable[storage]:
        flags += [SWAP]
    return [other for other in flags if other != flag]


def hot(evaluator: Evaluator) -> Bools:
    """Mark [s] storages with a copy in memory at the peak of the plan evaluated last: the paper's memory hot-spots."""
    birth, death = evaluator.lifetimes()
    at = evaluator.peak_run
    alive: Bools = np.any((birth <= at) & (at <= death), axis=0)
    storages, made, used = evaluator.between.T
    alive[storages[(made <= at) & (at <= used)]] = True
    return alive


def giving_back(evaluator: Evaluator, flags: Int8s) -> list[int]:
    """List storages that the plan evaluated last recomputes or swaps and could keep, longest recomputation first."""
    redo_ns = evaluator.problem.redo_ns[evaluator.problem.producer]
    spent = evaluator.recomputed() | ((flags == SWAP) & evaluator.step.swappable)
    spent &= (flags != KEEP) & ~evaluator.problem.pinned
    found = np.flatnonzero(spent)
    return found[np.argsort(-redo_ns[found], kind="stable")].tolist()  # type: ignore[no-any-return]


def saving(evaluator: Evaluator, flags: Int8s, most: int, *, allow_swap: bool) -> list[tuple[int, int]]:
    """List moves (storage, flag) that may lower the peak of the plan evaluated last, most bytes per ns first."""
    step, gaps = evaluator.step, evaluator.gaps
    at = evaluator.peak_run
    birth, death = evaluator.lifetimes()
    first_alive = (birth[0] <= at) & (at <= death[0])
    position = int(np.count_nonzero((evaluator.runs[: at + 1] & 1) == 0))
    in_gap = (gaps.start >= 0) & (gaps.start + 1 < position) & (position <= gaps.end)
    over = gaps.last + 1 < position
    redo_ns = evaluator.problem.redo_ns[step.producer]
    found: list[tuple[float, int, int]] = []
    movable = first_alive & (in_gap | over) & (step.nbytes > 0)
    for storage in np.flatnonzero(movable).tolist():
        nbytes = int(step.nbytes[storage])
        if step.redoable[storage]:
            flag = RECOMPUTE if in_gap[storage] else DROP
            found.append((-nbytes / (1 + int(redo_ns[storage])), storage, flag))
        if allow_swap and step.swappable[storage] and in_gap[storage]:
            found.append((-nbytes / (1 + int(step.xfer_ns[storage]) / 4), storage, SWAP))
    found.sort()
    return [(storage, flag) for _, storage, flag in found if flags[storage] != flag][:most]


def with_makers(evaluator: Evaluator, flags: Int8s, storage: int) -> list[int]:
    """Return a storage and those that exist only to recompute it: with flag DROP, they would stay for the next time."""
    problem, found = evaluator.problem, [storage]
    for each in found:
        used = problem.inputs(int(problem.producer[each]))
        only = (flags[used] == DROP) & evaluator.step.redoable[used] & (evaluator.gaps.start[used] < 0)
        found += [other for other in used[only].tolist() if other not in found]
    return found


def repeating(evaluator: Evaluator, flags: Int8s, most: int) -> list[int]:
    """List storages that are idle at the peak of the plan evaluated last after a recomputation, and could be recomputed
    once more instead (`with_makers`), most bytes per ns first."""
    birth, death = evaluator.lifetimes()
    at = evaluator.peak_run
    first = (evaluator.runs & 1) == 0
    position = np.cumsum(first) - first  # position of the node that each run serves
    made, gaps = birth[1], evaluator.gaps
    idle = (made >= 0) & (made <= at) & (at <= death[1]) & ((flags == RECOMPUTE) | (flags == DROP))
    idle &= position[made] < np.where(gaps.start >= 0, np.minimum(gaps.end, position[at]), position[at])
    found = np.flatnonzero(idle & (evaluator.step.nbytes > 0))
    redo_ns = evaluator.problem.redo_ns[evaluator.problem.producer[found]]
    score = -evaluator.step.nbytes[found] / (1 + redo_ns)
    return found[np.argsort(score, kind="stable")][:most].tolist()  # type: ignore[no-any-return]


SINGLE_MOVES = 512
"""Most moves, or groups, that are evaluated one by one; more are evaluated in batches."""


def worth_repeating(goal: Objective, plan: JudgedPlan) -> bool:
    """Return True if moves may recompute storages more than once: only where other plans miss the memory limit."""
    return goal.memory_limit is not None and (not plan.met(goal) or bool((plan.flags == REPEAT).any()))


def climb(
    judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan, *, allow_swap: bool, most: int = 48
) -> JudgedPlan:
    """Improve a plan by hill climbing over single storages: keep some again within the limit, save at the peak."""
    while True:
        flags = plan.flags.copy()
        judge.look(flags)
        spent = giving_back(judge.evaluator, flags)
        if len(spent) > SINGLE_MOVES:
            plan = _kept_together(judge, goal, plan, spent)
            flags = plan.flags.copy()
            judge.look(flags)
            spent = giving_back(judge.evaluator, flags)[:SINGLE_MOVES]
        moves = [([s], KEEP) for s in spent]
        if goal.memory_limit is None or not plan.met(goal):
            judge.look(flags)
            moves += [([s], flag) for s, flag in saving(judge.evaluator, flags, most, allow_swap=allow_swap)]
            again = repeating(judge.evaluator, flags, most) if worth_repeating(goal, plan) else []
            moves += [(with_makers(judge.evaluator, flags, s), REPEAT) for s in again]
        better: list[tuple[tuple[int, int], list[int], int]] = []
        for storages, flag in moves:
            before = flags[storages]
            flags[storages] = flag
            key = goal.key(*judge.cost(flags))
            flags[storages] = before
            if key < plan.key(goal):
                better.append((key, storages, flag))
        if not better:
            return plan
        for _, storages, flag in sorted(better):  # apply as many as fit together, best first
            before = flags[storages]
            flags[storages] = flag
            found = judge.cost(flags)
            if goal.key(*found) < plan.key(goal):
                plan = JudgedPlan(judge.evaluator.order, flags.copy(), *found)
            else:
                flags[storages] = before


def _kept_together(judge: BudgetedEvaluator, goal: Objective, plan: JudgedPlan, storages: list[int]) -> JudgedPlan:
    """Keep a prefix of the storages that improves the goal's key, in batches: twice as many after a success, half as
    many after a failure. A large step has thousands of storages, and each evaluation is slow."""
    start, count, failures = 0, len(storages), 0
    while start < len(storages) and failures < SINGLE_MOVES:
        flags = plan.flags.copy()
        flags[storages[start : start + count]] = KEEP
        found = judge.cost(flags)
        if goal.key(*found) < plan.key(goal):
            plan = JudgedPlan(plan.order, flags, *found)
            start, count = start + count, 2 * count
        else:
            failures += 1
            start, count = (start + 1, 1) if count == 1 else (start, count // 2)
    return plan


def reordered(judge: BudgetedEvaluator, plan: JudgedPlan) -> JudgedPlan:
    """Lower the peak of a plan by reordering windows around the peak, as long as that helps."""
    lower = True
    while lower:
        lower = False
        judge.use(plan.order)
        judge.look(plan.flags)
        for order in list(window_orders(judge.evaluator)):
            judge.use(order)
            child = judge.plan(plan.flags)
            if child.peak < plan.peak:
                plan, lower = child, True
                break
    judge.use(plan.order)
    return plan


def frugal_order(problem: Problem, order: Int32s) -> Int32s:
    """Return the legal order that at each place runs the operator which leaves the fewest bytes; equal ones as in
    ``order``.

    A weight's gradient comes before that of the layer's input, which outlives it: the activation that only the former
    reads is then made again, read and freed while one gradient of an activation is in memory, not two.
    """
    readers = problem.inputs.turned(problem.n_storages)
    left = np.diff(readers.ptr)
    lasting = problem.nbytes * ((left > 0) | problem.to_end)  # what updates alone read dies at once
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    after: list[list[int]] = [[] for _ in range(problem.n_nodes)]
    waits = np.zeros(problem.n_nodes, dtype=np.int64)
    for node in range(problem.n_nodes):
        for earlier in {*problem.extras(node).tolist(), *problem.producer[problem.inputs(node)].tolist()}:
            after[earlier].append(node)
            waits[node] += 1

    def leaves(node: int) -> tuple[int, int]:
        inputs = problem.inputs(node)
        freed = problem.nbytes[inputs[(left[inputs] == 1) & ~problem.to_end[inputs]]].sum()
        return int(lasting[problem.outputs(node)].sum() - freed), int(place[node])

    ready = np.flatnonzero(waits == 0).tolist()
    found = []
    while ready:
        node = min(ready, key=leaves)
        ready.remove(node)
        found.append(node)
        left[problem.inputs(node)] -= 1
        for later in after[node]:
            waits[later] -= 1
            if waits[later] == 0:
                ready.append(later)
    return np.array(found, dtype=order.dtype)


def _groups(problem: Problem, differing: Int64s) -> list[list[int]]:
    """Group connected storages: one is an input of the other's producer, or they have one producer."""
    root = {int(storage): int(storage) for storage in differing}

    def find(storage: int) -> int:
        while root[storage] != storage:
            root[storage] = root[root[storage]]
            storage = root[storage]
        return storage

    for storage in differing.tolist():
        node = int(problem.producer[storage])
        for other in (*problem.inputs(node).tolist(), *problem.outputs(node).tolist()):
            if other in root:
                low, high = sorted((find(other), find(storage)))
                root[high] = low
    groups: dict[int, list[int]] = {}
    for storage in differing.tolist():
        groups.setdefault(find(storage), []).append(storage)
    return list(groups.values())


def relink(judge: BudgetedEvaluator, goal: Objective, cheap: JudgedPlan, lean: JudgedPlan) -> JudgedPlan | None:
    """Mix two plans on one order: ``cheap`` exceeds the memory limit, ``lean`` keeps it.

    Groups switch from cheap to lean, most bytes per ns first, until the limit is kept; then groups that are not needed
    switch back, the most expensive first. Returns None if no mixture keeps the limit.
    """
    groups = _groups(judge.problem, np.flatnonzero(cheap.flags != lean.flags))
    if len(groups) > SINGLE_MOVES:
        together = -(-len(groups) // SINGLE_MOVES)
        groups = [list(chain.from_iterable(groups[at : at + together])) for at in range(0, len(groups), together)]
    if len(groups) < 2:
        return None
    ranked: list[tuple[float, int]] = []
    for index, group in enumerate(groups):
        flags = cheap.flags.copy()
        flags[group] = lean.flags[group]
        peak, latency = judge.cost(flags)
        saved, spent = cheap.peak - peak, latency - cheap.latency_ns
        ranked.append((spent / saved if saved > 0 else 1e12 + spent, index))
    ranked.sort()
    flags = cheap.flags.copy()
    for _, index in ranked:
        flags[groups[index]] = lean.flags[groups[index]]
        if goal.met(*judge.cost(flags)):
            break
    plan = judge.plan(flags)
    if not plan.met(goal):
        return None
    for _, index in reversed(ranked):
        trial = plan.flags.copy()
        trial[groups[index]] = cheap.flags[groups[index]]
        found = judge.cost(trial)
        if goal.key(*found) < plan.key(goal):
            plan = JudgedPlan(plan.order, trial, *found)
    return plan
