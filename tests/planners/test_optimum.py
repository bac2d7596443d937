"""The linear program: no plan, of its own model or of the evaluator, is below its optimum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="other planners are linear and integer programs, which scipy solves")

from benchmarks.lib.planners.optimum import Relaxation, optimum
from magis.search.budgeted_evaluator import BudgetedEvaluator, Objective
from magis.search.lagrangian_min_cut import LagrangianMinCut, slide_prices
from magis.simulate.evaluator import Evaluator, lower_bound
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, SWAP, NodeRow, Problem, StorageRow, build_problem
from tests.planners.modular import NETWORKS, setting
from tests.simulate.plans import problems
from tests.strategies import examples

MIB = 1 << 20


@examples(30)
@given(problems(10), st.floats(0, 1))
def test_fractions_are_never_dearer_than_whole_decisions(problem: Problem, tight: float) -> None:
    relaxed, whole = Relaxation(problem), Relaxation(problem, whole=True)
    floor = lower_bound(problem)
    limit = int(relaxed.base_peak + (floor - relaxed.base_peak) * tight)
    for goal in (Objective(memory_limit=limit), Objective(latency_limit_ns=int(relaxed.base_ns * (1 + tight)))):
        best, found = whole.solve(goal), relaxed.solve(goal)
        if best is not None:
            assert found is not None
            assert best.met(goal)
            assert goal.key(found.peak, found.latency_ns) <= goal.key(best.peak + 1, best.latency_ns + 1)
        if found is not None:
            assert found.met(goal)
            assert found.peak >= floor
            assert found.latency_ns >= relaxed.base_ns


def chain(seed: int, layers: int) -> Problem:
    """Layers of random sizes and times, and their way back, which takes what each of them made."""
    draw = np.random.Generator(np.random.PCG64(seed))
    forward = [
        NodeRow((k - 1,) if k else (), (k,), ns, redo_ns=ns, redo_ok=True)
        for k, ns in enumerate((1000 * draw.integers(1, 50, layers)).tolist())
    ]
    back = [NodeRow((layers - 1,), (layers,), 10_000)]
    back += [NodeRow((layers - 1 - k, layers + k - 1), (layers + k,), 10_000) for k in range(1, layers)]
    sizes = [*draw.integers(1, 100, layers).tolist(), *([8] * layers)]
    link = float(draw.choice([0.0, 0.005, 0.05]))
    return build_problem([*forward, *back], [StorageRow(nbytes * MIB) for nbytes in sizes], xfer_ns_per_byte=link)


@pytest.mark.parametrize("seed", range(5))
def test_no_plan_of_a_chain_is_better_than_the_optimum(seed: int) -> None:
    problem = chain(seed, 6)
    evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
    linear = Relaxation(problem)
    seen = set()
    for chosen in itertools.product((KEEP, RECOMPUTE, SWAP), repeat=5):  # the last layer's output has no gap
        flags = np.full(problem.n_storages, DROP, dtype=np.int8)
        flags[:5] = chosen
        seen.add(evaluator.quick(flags))
    for peak, latency_ns in seen:
        for goal in (Objective(memory_limit=peak), Objective(latency_limit_ns=latency_ns)):
            found = linear.solve(goal)
            assert found is not None
            assert found.peak <= peak
            assert found.latency_ns <= latency_ns + 1


@pytest.mark.parametrize("name", NETWORKS)
def test_no_plan_of_a_front_in_this_order_is_better_than_the_optimum(name: str) -> None:
    problem = setting(name).problem
    linear = Relaxation(problem)
    order = np.arange(problem.n_nodes)
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), 2000)
    model = LagrangianMinCut(judge.evaluator)
    limits = [linear.base_peak * share // 10 for share in range(9, 3, -1)]
    for price in (-1.0, 0.1) if problem.xfer_ns_per_byte else (-1.0,):
        slide_prices(judge, model, limits, rounds=4, link_price=price, kept=None)
    plans = judge.front()
    assert all(np.array_equal(plan.order, order) for plan in plans)
    assert len(plans) > 1
    for plan in plans[:: max(1, len(plans) // 8)]:
        fast, lean = (
            linear.solve(Objective(memory_limit=plan.peak)),
            linear.solve(Objective(latency_limit_ns=plan.latency_ns)),
        )
        assert fast is not None
        assert lean is not None
        assert fast.latency_ns <= plan.latency_ns + 1000
        assert lean.peak <= plan.peak + 1000


def test_the_optimum_of_what_needs_nothing_and_of_what_nothing_reaches() -> None:
    problem = setting("resnet").problem
    linear = Relaxation(problem)
    free = optimum(problem, Objective(memory_limit=linear.base_peak))
    assert free is not None
    assert (free.peak, free.latency_ns) == (linear.base_peak, linear.base_ns)
    assert optimum(problem, Objective(memory_limit=lower_bound(problem) - 1)) is None
    assert optimum(problem, Objective(latency_limit_ns=linear.base_ns - 1)) is None
    limits = [linear.base_peak * share // 20 for share in range(20, 8, -2)]
    found = [linear.solve(Objective(memory_limit=limit)) for limit in limits]
    times = [each.latency_ns for each in found if each is not None]
    assert times == sorted(times)
    assert times[-1] > linear.base_ns
