"""A search that is ended at any moment has a sound plan; so has one of the smallest budget, or of an absurd one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.fission.proof import verify_fission
from magis.graph import verify
from magis.planner.fission_plan import divide
from magis.search.budgeted_evaluator import BudgetedEvaluator, Deadline, Objective, PlanRequest, SearchOver
from magis.search.driver import SearchResult, search
from magis.search.fission_pareto import whole_front
from magis.search.loop_nest import level, realize_level, solve
from magis.search.loop_places import divided_front
from magis.search.pareto_sweep import BRIEF, sweep
from magis.search.split_at_peak import relieve
from magis.simulate.evaluator import check_order, evaluate
from magis.simulate.problem import DROP, KEEP
from magis.simulate.simulator import replay
from tests.search.subjects import BUDGET, Step, step
from tests.strategies import examples, is_soak


def at_call(number: int) -> Callable[[], bool]:
    """Says that a search is over from so many calls on; the first is 1."""
    calls = count(1)
    return lambda: next(calls) >= number


def calls_of(run: Callable[[Callable[[], bool]], object]) -> int:
    """How often a search that nothing ends asks."""
    calls = 0

    def over() -> bool:
        nonlocal calls
        calls += 1
        return False

    run(over)
    return calls


def assert_sound(made: Step, found: SearchResult, goal: Objective) -> None:
    problem = made.compiled.problem
    check_order(problem, found.order)
    again = evaluate(problem, found.order, found.flags)
    assert (again.peak, again.latency_ns) == (found.peak, found.latency_ns)
    assert found.feasible == goal.met(found.peak, found.latency_ns)
    assert goal.key(found.peak, found.latency_ns) <= goal.key(made.peak, made.latency_ns)  # program order at worst


GOALS = (
    lambda made: Objective(memory_limit=made.peak * 6 // 10),
    lambda made: Objective(memory_limit=1),
    lambda made: Objective(latency_limit_ns=made.latency_ns * 11 // 10),
)


@pytest.mark.parametrize("goal_of", GOALS, ids=["met", "out of reach", "latency"])
def test_a_search_that_ends_at_any_state_has_a_plan_that_only_gets_better(goal_of: Callable[[Step], Objective]) -> None:
    made = step("perceptron")
    goal = goal_of(made)

    def run(over: Callable[[], bool]) -> SearchResult:
        problem = made.compiled.problem
        return search(problem, goal, budget=150, over=over)

    whole, before = run(lambda: False), None
    assert not whole.stopped_by_seconds
    every = calls_of(run)
    for number in range(1, every + 1) if is_soak() else (1, 2, 3, 8, every // 2, every):
        found = run(at_call(number))
        assert_sound(made, found, goal)
        assert (found.stopped_by_seconds, found.states) == (True, number)
        key = goal.key(found.peak, found.latency_ns)
        assert before is None or key <= before
        before = key
    assert before is not None
    assert goal.key(whole.peak, whole.latency_ns) <= before


@pytest.mark.parametrize("budget", [1, 10**12])
@pytest.mark.parametrize("seconds", [1e-9, 0.001, 0.2])
@pytest.mark.parametrize("goal_of", GOALS, ids=["met", "out of reach", "latency"])
def test_any_budget_and_any_cap_have_a_plan(goal_of: Callable[[Step], Objective], budget: int, seconds: float) -> None:
    made = step("blocks")
    goal = goal_of(made)
    problem = made.compiled.problem
    found = search(
        problem,
        goal,
        budget=budget,
        over=Deadline(seconds).over,
    )
    assert_sound(made, found, goal)
    if budget == 1:
        assert (found.peak, found.latency_ns, found.states) == (made.peak, made.latency_ns, 1)


@examples(50)
@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=30), st.floats(0.0, 20.0))
def test_a_judge_stops_at_its_deadline_and_keeps_the_best(waits: list[float], seconds: float) -> None:
    """By a clock that a test moves on before every plan."""
    problem = step("perceptron").compiled.problem
    now = 0.0
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), budget=100, over=lambda: now > seconds)
    flags = np.full(problem.n_storages, DROP, dtype=np.int8)
    judged: list[tuple[int, int]] = []
    for number, wait in enumerate(waits):
        now += wait
        flags[: number + 1] = KEEP
        known = judge.states
        try:
            found = judge.cost(flags)
        except SearchOver:
            assert now > seconds
            assert judge.stopped_by_seconds
            break
        judged.append(found)
        assert now <= seconds or known in (0, judge.states)  # the first plan is always judged
    assert judge.best is not None
    assert (judge.best.peak, judge.best.latency_ns) == min(judged)


def test_a_sweep_that_ends_early_has_the_front_of_what_it_has_judged() -> None:
    problem = step("perceptron").compiled.problem
    every = calls_of(lambda over: sweep(problem, BRIEF, over))
    for number in (1, 2, 3, 5, 8, every // 3, every // 2, every - 1, every):
        front = sweep(problem, BRIEF, at_call(number))
        assert front.states == number
        assert front.points
        for plan in front.points:
            found = evaluate(problem, plan.order, plan.flags)
            assert (found.peak, found.latency_ns) == (plan.peak, plan.latency_ns)
    assert whole_front(step("perceptron").graph, step("perceptron").costs, reuse=True, over=lambda: True).states == 1


@cache
def calls_of_a_front() -> int:
    made = step("blocks")
    request = partial(PlanRequest, Objective(memory_limit=0), 0, 20)
    return calls_of(lambda over: divided_front(made.graph, made.costs, request(over), reuse=True))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99])
def test_a_front_of_loops_that_ends_early_has_sound_points(share: float) -> None:
    made = step("blocks")
    over = at_call(2 + int(share * calls_of_a_front()))  # the first call is before any place
    wanted = PlanRequest(Objective(memory_limit=made.peak // 2), 0, 20, over)
    front = divided_front(made.graph, made.costs, wanted, reuse=True)
    assert front.points
    found = divide(front, wanted)
    assert found is not None
    graph = realize_level(found.level, found.solution)
    verify(graph)
    verify_fission(graph)
    verify_fission(found.level.compiled.graph, made.graph)
    assert replay(graph, made.costs.workspace, rounding=made.costs.rounding).peak_bytes == found.solution.peak


def test_a_front_of_loops_that_is_over_before_it_begins_has_a_hasty_look_at_one_place() -> None:
    made = step("blocks")
    wanted = PlanRequest(Objective(memory_limit=0), 0, BUDGET, lambda: True)
    points = divided_front(made.graph, made.costs, wanted, reuse=True).points
    assert len({point.cut and (point.cut.at, point.cut.number) for point in points}) == 1
    for point in points:
        assert point.cut is not None
        verify_fission(point.level.compiled.graph, made.graph)
        verify(realize_level(point.level, point.solution()))


@pytest.mark.parametrize("number", [1, 2, 3, 10, 100])
def test_levels_and_loops_around_single_operators_end_early_too(number: int) -> None:
    made = step("convolution")
    goal = Objective(memory_limit=made.peak // 2)
    eased = relieve(made.graph, made.costs, PlanRequest(goal, 0, 10**9, at_call(number)), reuse=True)
    if eased is not None:
        verify_fission(eased.graph, made.graph)
        assert eased.plan.peak <= made.peak
    here = level(made.graph, made.costs, reuse=True)
    found = solve(here, PlanRequest(goal, 0, 10**9, at_call(number)))
    assert found.peak <= made.peak
    assert found.states == number


def test_an_interrupt_comes_through_at_once() -> None:
    made = step("blocks")
    calls = count(1)

    def over() -> bool:
        if next(calls) >= 50:
            raise KeyboardInterrupt
        return False

    wanted = PlanRequest(Objective(memory_limit=0), 0, BUDGET, over)
    with pytest.raises(KeyboardInterrupt):
        divided_front(made.graph, made.costs, wanted, reuse=True)
    assert next(calls) == 51  # nobody asked again
