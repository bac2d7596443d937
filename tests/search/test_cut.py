"""Minimum cuts against all cuts of small networks, and the proposals that they make."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.search.budgeted_evaluator import BudgetedEvaluator, Objective
from magis.search.lagrangian_min_cut import LagrangianMinCut, checkpoints, follow_prices, levels_by_position, min_cut
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, SWAP, NodeRow, Problem, StorageRow, build_problem
from tests.search.networks import resnet, transformer


def value(side: np.ndarray, edges: list[tuple[int, int, int]]) -> int:
    return sum(capacity for tail, head, capacity in edges if side[tail] and not side[head])


@given(st.data())
def test_min_cut_is_the_smallest_of_all(data: st.DataObject) -> None:
    vertices = data.draw(st.integers(2, 6))
    pairs = st.tuples(st.integers(0, vertices - 1), st.integers(0, vertices - 1), st.integers(0, 20))
    edges = data.draw(st.lists(pairs, max_size=14))
    tail, head, capacity = (np.array([edge[i] for edge in edges]) for i in range(3))
    side = min_cut(vertices, tail.astype(np.int32), head.astype(np.int32), capacity.astype(np.int64), 0, 1)
    assert side[0]
    assert not side[1]
    cuts = [np.array([True, False, *rest]) for rest in itertools.product((True, False), repeat=vertices - 2)]
    smallest = min(value(cut, edges) for cut in cuts)
    assert value(side, edges) == smallest
    assert all(np.all(cut[side]) for cut in cuts if value(cut, edges) == smallest), "not closest to the source"


def three_layers() -> Problem:
    """x -> a -> b -> c forward, then the way back, which reads c, b, a, x; b is cheap to make again."""
    redo_ns = (900, 500, 10, 500)
    nodes = [NodeRow((i - 1,) if i else (), (i,), 100, redo_ns=redo_ns[i], redo_ok=True) for i in range(4)]
    nodes += [NodeRow(reads, (4 + i,), 100) for i, reads in enumerate([(3,), (4, 2), (5, 1), (6, 0)])]
    return build_problem(nodes, [StorageRow(1000)] * 8, xfer_ns_per_byte=0.05)


@pytest.mark.parametrize(("price", "recomputed"), [(0.0, []), (0.02, [2]), (0.17, [1, 2]), (100.0, [0, 1, 2])])
def test_dearer_memory_is_given_up_for_dearer_operators(price: float, recomputed: list[int]) -> None:
    problem = three_layers()
    model = LagrangianMinCut(Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32)))
    flags = model.solve(np.full(problem.n_nodes, price), -1.0)
    assert np.flatnonzero(flags == RECOMPUTE).tolist() == recomputed


def test_what_is_kept_is_not_made_again_and_links_beat_operators_when_cheap() -> None:
    problem = three_layers()
    model = LagrangianMinCut(Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32)))
    kept = np.zeros(problem.n_storages, dtype=np.bool_)
    kept[1] = True
    flags = model.solve(np.full(problem.n_nodes, 100.0), -1.0, kept)
    assert flags[1] == KEEP
    assert flags[2] == RECOMPUTE
    swapped = model.solve(np.full(problem.n_nodes, 0.4), 0.001)
    assert np.flatnonzero(swapped == SWAP).tolist() == [0, 1, 2]


def test_prices_lead_to_the_limit() -> None:
    problem, _ = transformer(6)
    untouched = np.full(problem.n_storages, DROP, dtype=np.int8)
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=1000)
    base = judge.plan(untouched)
    limit = base.peak * 7 // 10
    for sharp in (False, True):
        plans = follow_prices(judge, LagrangianMinCut(judge.evaluator), limit, rounds=48, sharp=sharp)
        assert plans[0].peak > limit
        within = [plan for plan in plans if plan.peak <= limit]
        assert within
        assert min(plan.latency_ns for plan in within) < base.latency_ns * 1.15
    assert follow_prices(judge, LagrangianMinCut(judge.evaluator), base.peak, rounds=48) == []


def test_checkpoints_are_few_at_first_and_make_lean_plans() -> None:
    problem, marks = resnet((4, 4), batch=8)
    evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
    base, _ = evaluator.quick(np.full(problem.n_storages, DROP, dtype=np.int8))
    block, _ = evaluator.quick(all_but(evaluator, marks))
    peaks = []
    for kept in checkpoints(evaluator):
        assert kept.any()
        peaks.append(evaluator.quick(all_but(evaluator, np.flatnonzero(kept).tolist()))[0])
    assert min(peaks) <= block < base, "as lean as checkpoints by hand"


def all_but(evaluator: Evaluator, kept: list[int]) -> np.ndarray:
    flags = np.where(evaluator.step.redoable, RECOMPUTE, KEEP).astype(np.int8)
    flags[kept] = KEEP
    return flags


def test_levels_by_position_count_recomputations_where_they_are_needed() -> None:
    problem = three_layers()
    evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
    flags = np.full(problem.n_storages, DROP, dtype=np.int8)
    flags[1] = RECOMPUTE
    peak, _ = evaluator.quick(flags)
    levels = levels_by_position(evaluator)
    assert len(levels) == problem.n_nodes
    assert levels.max() == peak
    assert levels[0] == 1000
