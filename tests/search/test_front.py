"""Fronts: every plan is what it says, none beats another, and nothing better was judged on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from magis.errors import MagisError
from magis.fission.lower_bound import lower_bound
from magis.fission.proof import verify_fission
from magis.graph import verify
from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective, PlanRequest
from magis.search.fission_pareto import FissionPoint, LoopPlace, place_front, whole_front
from magis.search.loop_nest import level, realize_level
from magis.search.loop_places import divided_front
from magis.search.moves import alternatives
from magis.search.pareto_sweep import BRIEF, FULL, Effort, Front, pareto, spread, sweep
from magis.simulate.evaluator import Evaluator, check_order, evaluate, expand
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, REDO, STORE, NodeRow, Problem, StorageRow, build_problem
from magis.simulate.simulator import replay
from tests.search.subjects import BUDGET, Step, front_of, step

NAMES = ("perceptron", "blocks", "seed-unet")


def costs(front: Front[JudgedPlan]) -> list[tuple[int, int]]:
    return [(plan.peak, plan.latency_ns) for plan in front.points]


def assert_monotone(pairs: list[tuple[int, int]]) -> None:
    for (lean, slow), (wide, fast) in itertools.pairwise(pairs):
        assert lean < wide
        assert slow > fast


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("effort", [FULL, BRIEF], ids=["full", "brief"])
def test_plans_of_a_sweep_cost_what_they_say(name: str, effort: Effort) -> None:
    problem = step(name).compiled.problem
    front = sweep(problem, effort)
    assert_monotone(costs(front))
    for plan in front.points:
        check_order(problem, plan.order)
        found = evaluate(problem, plan.order, plan.flags)
        assert (found.peak, found.latency_ns) == (plan.peak, plan.latency_ns)
    again = sweep(problem, effort)
    assert (costs(again), again.states) == (costs(front), front.states)
    untouched = np.full(problem.n_storages, DROP, dtype=np.int8)
    base = evaluate(problem, np.arange(problem.n_nodes, dtype=np.int32), untouched)
    assert front.points[-1].latency_ns == base.latency_ns
    assert front.points[-1].peak <= base.peak
    assert front.points[0].peak < base.peak


def test_a_sweep_leaves_out_what_it_is_told_to() -> None:
    problem = replace(step("seed-unet").compiled.problem, xfer_ns_per_byte=2.0)
    usual = sweep(problem, BRIEF)
    repeats = [every_repeat(problem, plan) for plan in usual.points]
    assert np.any(np.array(repeats), axis=0).all()
    for plan in sweep(problem, replace(BRIEF, recompute=False)).points:
        assert every_repeat(problem, plan)[0] == 0
        found = evaluate(problem, plan.order, plan.flags)  # of the problem in which more is allowed
        assert (found.peak, found.latency_ns) == (plan.peak, plan.latency_ns)
    for plan in sweep(problem, replace(BRIEF, swap=False)).points:
        assert every_repeat(problem, plan)[1] == 0
    for plan in sweep(problem, replace(BRIEF, reorder=False)).points:
        assert plan.order.tolist() == list(range(problem.n_nodes))
    for less in (replace(BRIEF, polished=0), replace(BRIEF, mixed=0)):
        assert sweep(problem, less).states < usual.states


def every_repeat(problem: Problem, plan: JudgedPlan) -> tuple[int, int]:
    """Operators run again, bytes swapped."""
    events = expand(problem, plan.order, plan.flags)
    return int(np.count_nonzero(events.kind == REDO)), int(problem.nbytes[events.arg[events.kind == STORE]].sum())


def test_whoever_watches_a_sweep_is_told_every_plan() -> None:
    seen: list[tuple[int, int]] = []
    problem = step("blocks").compiled.problem
    found = sweep(problem, replace(BRIEF, watch=lambda peak, latency_ns: seen.append((peak, latency_ns))))
    assert len(seen) == found.states
    assert set(costs(found)) <= set(seen)
    assert costs(found) == costs(sweep(problem, BRIEF))


def every_plan(problem: Problem) -> list[tuple[int, int]]:
    """Costs of every assignment of flags to storages that have a choice, in program order."""
    evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
    choices = [
        (DROP, *alternatives(evaluator, storage, DROP, allow_swap=True)) for storage in range(problem.n_storages)
    ]
    free = [storage for storage, flags in enumerate(choices) if len(flags) > 1 and evaluator.step.nbytes[storage]]
    found = []
    for chosen in itertools.product(*(choices[storage] for storage in free)):
        flags = np.full(problem.n_storages, DROP, dtype=np.int8)
        flags[free] = chosen
        found.append(evaluator.quick(flags))
    return found


def chain(seed: int, layers: int = 6) -> Problem:
    """Layers of random sizes and times, and their way back, which takes what each of them made."""
    draw = np.random.Generator(np.random.PCG64(seed))
    forward = [
        NodeRow((k - 1,) if k else (), (k,), ns, redo_ns=ns, redo_ok=True)
        for k, ns in enumerate(draw.integers(1, 50, layers).tolist())
    ]
    back = [NodeRow((layers - 1,), (layers,), 10)]
    back += [NodeRow((layers - 1 - k, layers + k - 1), (layers + k,), 10) for k in range(1, layers)]
    sizes = [*draw.integers(1, 100, layers).tolist(), *([8] * layers)]
    return build_problem([*forward, *back], [StorageRow(nbytes) for nbytes in sizes])


def best_of(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for peak, latency in sorted(set(pairs)):
        if not found or latency < found[-1][1]:
            found.append((peak, latency))
    return found


def test_sweeps_reach_most_of_what_all_plans_of_small_steps_reach() -> None:
    reached = total = 0
    for seed in range(8):
        problem = chain(seed)
        best = best_of(every_plan(problem))
        found = costs(sweep(problem))
        assert_monotone(found)
        assert found[-1][1] == best[-1][1]
        total += len(best)
        reached += sum(any(p <= peak and t <= latency for p, t in found) for peak, latency in best)
    assert total > 50
    assert reached >= 0.9 * total, (reached, total)


def test_the_front_of_a_judge_is_that_of_all_it_has_judged() -> None:
    problem = step("perceptron").compiled.problem
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), 500)
    draw = np.random.Generator(np.random.PCG64(0))
    judged = []
    for _ in range(300):
        flags = draw.choice(np.array([DROP, KEEP, RECOMPUTE], dtype=np.int8), problem.n_storages)
        judged.append(judge.cost(flags))
    front = [(plan.peak, plan.latency_ns) for plan in judge.front()]
    assert_monotone(front)
    assert set(front) <= set(judged)
    for peak, latency in judged:
        assert any(lean <= peak and fast <= latency for lean, fast in front)


def test_nothing_of_a_front_is_nothing() -> None:
    assert spread(sweep(step("perceptron").compiled.problem).points, 0) == []


@pytest.mark.parametrize("count", [2, 3, 7, 100])
def test_a_thinned_front_keeps_its_ends(count: int) -> None:
    front = sweep(step("seed-unet").compiled.problem).points
    chosen = spread(front, count)
    assert len(chosen) <= count
    assert chosen[0] is front[0]
    assert chosen[-1] is front[-1]
    assert [plan.peak for plan in chosen] == sorted(plan.peak for plan in chosen)
    assert pareto(chosen) == chosen


def divided(given: Step) -> tuple[FissionPoint, ...]:
    return divided_front(given.graph, given.costs, PlanRequest(Objective(memory_limit=0), 0, BUDGET), reuse=True).points


@pytest.mark.parametrize("name", ["blocks", "seed-unet"])
def test_every_point_of_a_divided_front_is_a_sound_step_of_that_size(name: str) -> None:
    given = step(name)
    points = front_of(given).points
    assert_monotone([(point.peak, point.latency_ns) for point in points])
    floor = lower_bound(given.graph, given.costs.workspace, given.costs.rounding).nbytes
    for point in spread(points, 12):
        assert point.cut is not None
        solution = point.solution()
        assert (solution.peak, solution.latency_ns) == (point.peak, point.latency_ns)
        graph = realize_level(point.level, solution)
        verify(graph)
        verify_fission(graph)
        verify_fission(point.level.compiled.graph, given.graph)
        assert replay(graph, given.costs.workspace, rounding=given.costs.rounding).peak_bytes == point.peak >= floor
    whole = whole_front(given.graph, given.costs, reuse=True).points
    assert min(point.peak for point in points) < min(point.peak for point in whole)
    assert [(p.peak, p.latency_ns) for p in divided(given)] == [(p.peak, p.latency_ns) for p in points]


def test_a_step_whose_batch_cannot_be_cut_has_no_divided_front() -> None:
    assert divided(step("one row")) == ()


def test_a_front_of_loops_refuses_a_step_without_one() -> None:
    given = step("perceptron")
    with pytest.raises(MagisError, match="needs a loop"):
        place_front([(LoopPlace(0, 2), level(given.graph, given.costs, reuse=True))])
