"""Re-ordering by windows: exact in the window, legal, and only ever believed when the evaluator agrees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.search.budgeted_evaluator import Objective
from magis.search.driver import search
from magis.search.moves import frugal_order
from magis.search.window import WIDEST, best_order, window_orders
from magis.simulate.evaluator import Evaluator, check_order
from magis.simulate.problem import DROP, NodeRow, Problem, StorageRow, build_problem
from tests.search.networks import transformer
from tests.simulate.plans import plans, problems, random_order
from tests.strategies import examples


def base(problem: Problem) -> np.ndarray:
    return np.arange(problem.n_nodes, dtype=np.int32)


def peak(problem: Problem, order: np.ndarray) -> int:
    return Evaluator(problem, order).quick(np.full(problem.n_storages, DROP, dtype=np.int8))[0]


def legal_orders(problem: Problem) -> list[np.ndarray]:
    needed = [
        {*problem.extras(v).tolist(), *problem.producer[problem.inputs(v)].tolist()} for v in range(problem.n_nodes)
    ]
    return [
        np.array(order, dtype=np.int32)
        for order in itertools.permutations(range(problem.n_nodes))
        if all(needed[v] <= set(order[:k]) for k, v in enumerate(order))
    ]


@examples(60)
@given(problems(6, blocks=False))
def test_a_window_over_everything_finds_the_best_order_of_all(problem: Problem) -> None:
    plain = build_problem(  # without in-place re-use, whose use depends on the order
        [
            NodeRow(
                tuple(problem.inputs(v).tolist()),
                tuple(problem.outputs(v).tolist()),
                1,
                int(problem.node_ws[v]),
                extra=tuple(problem.extras(v).tolist()),
            )
            for v in range(problem.n_nodes)
        ],
        [StorageRow(int(size), to_end=bool(end)) for size, end in zip(problem.nbytes, problem.to_end, strict=True)],
    )
    best = min(peak(plain, order) for order in legal_orders(plain))
    evaluator = Evaluator(plain, base(plain))
    now, _ = evaluator.quick(np.full(plain.n_storages, DROP, dtype=np.int8))
    found = [peak(plain, order) for order in window_orders(evaluator)]
    assert min([now, *found]) == best


@given(plans(), st.integers(2, WIDEST))
def test_windows_keep_every_hazard(plan: tuple[Problem, np.ndarray, np.ndarray], width: int) -> None:
    problem, order, flags = plan
    evaluator = Evaluator(problem, order)
    evaluator.quick(flags)
    for other in window_orders(evaluator, width):
        check_order(problem, other)
        assert not np.array_equal(other, order)


def test_two_branches_are_run_one_after_the_other() -> None:
    """Two branches with large inner tensors, interleaved by the program: the window separates them."""
    nodes = [
        NodeRow((), (0,), 1),
        NodeRow((0,), (1,), 1),
        NodeRow((0,), (2,), 1),
        NodeRow((1,), (3,), 1),
        NodeRow((2,), (4,), 1),
        NodeRow((3, 4), (5,), 1),
    ]
    problem = build_problem(nodes, [StorageRow(size) for size in (1, 100, 100, 1, 1, 1)])
    evaluator = Evaluator(problem, base(problem))
    before, _ = evaluator.quick(np.full(6, DROP, dtype=np.int8))
    found = list(window_orders(evaluator))
    assert before == 201
    assert [order.tolist() for order in found] == [[0, 1, 3, 2, 4, 5]]
    assert peak(problem, found[0]) == 102


def test_equal_orders_leave_the_program_alone() -> None:
    zeros = np.zeros(3, dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    assert best_order(zeros, zeros, none, none, none, zeros).tolist() == [0, 1, 2]


def test_a_spoilt_order_is_repaired_in_part() -> None:
    problem, _ = transformer(1, batch=2)
    order = random_order(problem, np.random.default_rng(3))
    spoilt = peak(problem, order)
    best = spoilt
    for _ in range(20):
        evaluator = Evaluator(problem, order)
        evaluator.quick(np.full(problem.n_storages, DROP, dtype=np.int8))
        better = [other for other in window_orders(evaluator) if peak(problem, other) < best]
        if not better:
            break
        order = better[0]
        best = peak(problem, order)
    assert best < spoilt


@given(plans())
def test_the_frugal_order_keeps_every_hazard(plan: tuple[Problem, np.ndarray, np.ndarray]) -> None:
    problem, order, _ = plan
    check_order(problem, frugal_order(problem, order))


@pytest.mark.parametrize(("limit", "feasible"), [(30, True), (29, False)])
def test_layers_train_in_three_activations_where_weights_gradients_come_first(limit: int, feasible: bool) -> None:
    """Each is made again from the first one, which takes two, while a gradient is in memory. The program makes the
    gradient of a layer's input before that of its weight: with both in memory, it takes four."""
    layers = 6
    nodes = [NodeRow((at - 1,) if at else (), (at,), 1, redo_ns=1, redo_ok=True) for at in range(layers + 1)]
    nodes.append(NodeRow((layers,), (layers + 1,), 1))
    for at in range(layers - 1, -1, -1):
        gradient = layers + 1 + 2 * (layers - 1 - at)
        nodes += [
            NodeRow((gradient,), (gradient + 1,), 1),
            NodeRow((gradient, at), (), 1),
            NodeRow((gradient + 1, at), (gradient + 2,), 1),
        ]
    problem = build_problem(nodes, [StorageRow(10)] * (3 * layers + 2))
    assert search(problem, Objective(memory_limit=limit), budget=5000).feasible == feasible
