"""Moves between plans, and the judge's books."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective, SearchOver, affordable
from magis.search.driver import search
from magis.search.moves import SINGLE_MOVES, alternatives, climb, giving_back, hot, relink, saving
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, SWAP, Int8s, Problem
from tests.search.networks import resnet, transformer


@pytest.fixture(scope="module")
def problem() -> Problem:
    return transformer(4, xfer_ns_per_byte=0.05)[0]


def untouched(problem: Problem) -> Int8s:
    return np.full(problem.n_storages, DROP, dtype=np.int8)


def all_dropped(judge: BudgetedEvaluator) -> Int8s:
    return np.where(judge.evaluator.step.redoable, RECOMPUTE, KEEP).astype(np.int8)


def test_goals_order_plans_by_excess_first() -> None:
    memory, latency = Objective(memory_limit=100), Objective(latency_limit_ns=50)
    assert memory.key(90, 7) == memory.key(100, 7) < memory.key(100, 8) < memory.key(101, 1)
    assert latency.key(7, 40) == latency.key(7, 50) < latency.key(8, 50) < latency.key(1, 51)
    assert memory.met(100, 10**9)
    assert not memory.met(101, 0)
    assert latency.met(10**12, 50)
    assert not latency.met(0, 51)


def test_the_judge_counts_each_plan_once_and_keeps_the_best(problem: Problem) -> None:
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=3)
    lean = judge.cost(all_dropped(judge))
    assert judge.cost(all_dropped(judge)) == lean
    assert judge.states == 1
    fat = judge.cost(untouched(problem))
    assert fat[0] > lean[0]
    assert judge.best is not None
    assert (judge.best.peak, judge.best.latency_ns) == lean
    order = np.arange(problem.n_nodes, dtype=np.int32)
    judge.use(order)
    assert judge.cost(untouched(problem)) == fat
    assert judge.states == 2
    judge.cost(np.zeros_like(untouched(problem)))
    flags = untouched(problem)
    flags[0] = KEEP
    with pytest.raises(SearchOver):
        judge.cost(flags)
    assert judge.cost(untouched(problem)) == fat, "what was seen stays known"
    assert not judge.stopped_by_seconds


def test_seconds_stop_the_judge_and_it_says_so(problem: Problem) -> None:
    over = [False]
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=100, over=lambda: over[0])
    judge.cost(untouched(problem))
    over[0] = True
    with pytest.raises(SearchOver):
        judge.cost(all_dropped(judge))
    assert judge.stopped_by_seconds
    assert judge.states == 1


@pytest.mark.parametrize(
    ("nodes", "states"), [(1, 30_000), (1500, 30_000), (3000, 15_000), (12_000, 3750), (10**7, 3750)]
)
def test_large_steps_are_judged_less_often(nodes: int, states: int) -> None:
    assert affordable(30_000, nodes) == states


def test_a_plan_that_costs_nothing_ends_a_search(problem: Problem) -> None:
    free = replace(problem, redo_ns=np.zeros_like(problem.redo_ns))
    base = BudgetedEvaluator(free, Objective(memory_limit=0), budget=10).plan(untouched(free))
    goal = Objective(memory_limit=base.peak * 7 // 10)
    found = search(free, goal, budget=3000)
    assert found.feasible
    assert found.latency_ns == free.least_ns
    assert found.states < 3000, "less than it may try"
    dear = search(problem, goal, budget=3000)
    assert dear.latency_ns > problem.least_ns
    assert dear.states == 3000


def test_many_tensors_are_kept_again_together() -> None:
    problem = transformer(60)[0]
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=100_000)
    plan = judge.plan(all_dropped(judge))
    judge.look(plan.flags)
    assert len(giving_back(judge.evaluator, plan.flags)) > SINGLE_MOVES
    goal = Objective(memory_limit=10**15)
    kept = climb(judge, goal, plan, allow_swap=False)
    assert kept.latency_ns == problem.least_ns
    assert judge.states < SINGLE_MOVES


def test_hot_spots_hold_the_peak(problem: Problem) -> None:
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=10)
    peak, _ = judge.look(untouched(problem))
    alive = int(problem.nbytes[hot(judge.evaluator)].sum()) + problem.persistent_bytes
    assert alive <= peak <= alive + int(problem.node_ws.max()) + int(problem.blk_ws.max())


def test_saving_moves_name_hot_spots_that_can_go(problem: Problem) -> None:
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=100)
    base, _ = judge.look(untouched(problem))
    moves = saving(judge.evaluator, untouched(problem), 1000, allow_swap=False)
    spots = hot(judge.evaluator)
    step = judge.evaluator.step
    assert moves
    assert all(spots[s] and step.redoable[s] and flag in (RECOMPUTE, DROP) for s, flag in moves)
    storage, flag = moves[0]
    flags = untouched(problem)
    flags[storage] = flag
    assert judge.cost(flags)[0] < base
    judge.look(untouched(problem))
    swaps = saving(judge.evaluator, untouched(problem), 1000, allow_swap=True)
    assert SWAP in {flag for _, flag in swaps}
    judge.look(flags)
    assert (storage, flag) not in saving(judge.evaluator, flags, 1000, allow_swap=False)


def test_giving_back_names_what_is_made_again(problem: Problem) -> None:
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=100)
    judge.look(untouched(problem))
    assert giving_back(judge.evaluator, untouched(problem)) == []
    flags = all_dropped(judge)
    _, latency = judge.look(flags)
    found = giving_back(judge.evaluator, flags)
    assert set(found) == set(np.flatnonzero(judge.evaluator.recomputed()).tolist())
    flags[found] = KEEP
    assert judge.cost(flags)[1] < latency


def test_alternatives_change_something(problem: Problem) -> None:
    evaluator = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=1).evaluator
    for storage in range(problem.n_storages):
        for flag in (KEEP, RECOMPUTE, SWAP, DROP):
            others = alternatives(evaluator, storage, flag, allow_swap=True)
            assert flag not in others
            if not evaluator.step.redoable[storage]:
                assert not {RECOMPUTE, DROP} & set(others)
            assert SWAP not in alternatives(evaluator, storage, flag, allow_swap=False)


def test_climbing_gives_back_what_the_limit_allows() -> None:
    problem, _ = resnet((3, 3), batch=4)
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=100_000)
    base = judge.plan(untouched(problem))
    lean = judge.plan(all_dropped(judge))
    goal = Objective(memory_limit=(base.peak + lean.peak) // 2)
    found = climb(judge, goal, lean, allow_swap=False)
    assert found.met(goal)
    assert found.latency_ns < lean.latency_ns
    judge.look(found.flags)
    for storage in giving_back(judge.evaluator, found.flags):  # a local optimum: no single return fits
        flags = found.flags.copy()
        flags[storage] = KEEP
        assert goal.key(*judge.cost(flags)) >= found.key(goal)


def test_climbing_from_above_a_limit_lowers_the_peak(problem: Problem) -> None:
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=100_000)
    base = judge.plan(untouched(problem))
    goal = Objective(memory_limit=base.peak * 95 // 100)
    found = climb(judge, goal, base, allow_swap=False)
    assert found.met(goal)


def test_mixing_a_cheap_and_a_lean_plan_beats_the_lean_one(problem: Problem) -> None:
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=100_000)
    base = judge.plan(untouched(problem))
    gelu = untouched(problem)  # outputs of the widest layers, whose inputs are kept
    wide = problem.nbytes == 16 * 2**20
    gelu[wide & judge.evaluator.step.redoable & (judge.evaluator.gaps.start >= 0)] = RECOMPUTE
    cheap, lean = base, judge.plan(gelu)
    goal = Objective(memory_limit=(cheap.peak + lean.peak) // 2)
    mixed = relink(judge, goal, cheap, lean)
    assert mixed is not None
    assert mixed.met(goal)
    assert cheap.latency_ns < mixed.latency_ns < lean.latency_ns
    assert relink(judge, Objective(memory_limit=0), cheap, lean) is None
    assert relink(judge, goal, lean, lean) is None


def test_a_plan_knows_its_key() -> None:
    plan = JudgedPlan(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int8), 10, 20)
    assert plan.key(Objective(memory_limit=15)) == (15, 20)
    assert not plan.met(Objective(latency_limit_ns=19))
