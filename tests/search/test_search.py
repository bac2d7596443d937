"""The search: limits, optimality on small steps, quality on large ones, determinism."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from magis.capture import capture
from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.errors import UsageError
from magis.ops.optimizers import OptimizerSpec
from magis.rewrite.functionalize import functionalize, untangle
from magis.search import driver, moves
from magis.search.budgeted_evaluator import Deadline, Objective
from magis.search.driver import SearchResult, search
from magis.search.moves import alternatives
from magis.search.pareto_sweep import BRIEF, around_best, sweep
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import Evaluator, check_order, evaluate, lower_bound
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, REPEAT, Int32s, Problem
from tests.search.networks import Tape, resnet, transformer, unet
from tests.simulate.plans import random_problem

BUDGET = 6000  # enough for the networks here, and quick


def order_of(problem: Problem) -> Int32s:
    return np.arange(problem.n_nodes, dtype=np.int32)


def untouched(problem: Problem) -> tuple[int, int]:
    """Peak and latency without any change."""
    found = evaluate(problem, order_of(problem), np.full(problem.n_storages, DROP, dtype=np.int8))
    return found.peak, found.latency_ns


def checked(problem: Problem, result: SearchResult) -> SearchResult:
    """The same result, after a look at whether it says the truth."""
    check_order(problem, result.order)
    found = evaluate(problem, result.order, result.flags)
    assert (found.peak, found.latency_ns) == (result.peak, result.latency_ns)
    assert lower_bound(problem) <= result.peak
    return result


def tiny(seed: int) -> Problem:
    """A step of a few layers."""
    rng = np.random.default_rng(seed)
    tape = Tape()
    x = tape.op([], [512 * int(rng.integers(1, 9))])[0]
    rows = tape.sizes[x] // 32
    made = [x]
    for _ in range(int(rng.integers(3, 6))):
        kind = int(rng.integers(4))
        if kind == 0:
            x = tape.linear(x, rows, 8, 8)
        elif kind == 1:
            x = tape.pointwise(x, keep_input=bool(rng.integers(2)))
        elif kind == 2 and len(made) > 1:
            x = tape.add(x, made[int(rng.integers(len(made)))])
        else:
            x = tape.linear(x, rows, 8, 8, conv=9)
        made.append(x)
    return tape.finish(x)


def all_costs(problem: Problem) -> dict[int, int]:
    """Least latency by peak, of all plans on the program's order."""
    evaluator = Evaluator(problem, order_of(problem))
    options = [alternatives(evaluator, s, -1, allow_swap=False) for s in range(problem.n_storages)]
    costs: dict[int, int] = {}
    for flags in itertools.product(*options):
        peak, latency = evaluator.quick(np.array(flags, dtype=np.int8))
        costs[peak] = min(costs.get(peak, latency), latency)
    return costs


@pytest.mark.parametrize("seed", [0, 3, 8, 12, 19, 22, 25, 26])  # few enough plans, enough different costs
def test_small_steps_get_the_optimum_of_all_plans(seed: int) -> None:
    problem = tiny(seed)
    costs = all_costs(problem)
    base, _ = untouched(problem)
    for share in (0.5, 1.0):
        limit = int(base - share * (base - min(costs)))
        best = min(latency for peak, latency in costs.items() if peak <= limit)
        result = checked(problem, search(problem, Objective(memory_limit=limit), budget=3000))
        assert result.feasible
        assert result.latency_ns <= best  # below it only by another order
    leanest = min(peak for peak, latency in costs.items() if latency <= best)
    lean = checked(problem, search(problem, Objective(latency_limit_ns=best), budget=3000))
    assert lean.feasible
    assert lean.peak <= leanest


def test_odd_steps_are_searched_too() -> None:
    """Mutation, pinned storages, several outputs, hazards, swaps: nothing of it breaks the search."""
    gained = 0
    for seed in range(12):
        problem = random_problem(np.random.default_rng(seed), 14)
        base, latency = untouched(problem)
        result = checked(problem, search(problem, Objective(memory_limit=lower_bound(problem)), budget=300))
        assert result.peak <= base
        gained += result.peak < base
        lean = checked(problem, search(problem, Objective(latency_limit_ns=latency), budget=300))
        assert lean.latency_ns <= latency
        assert lean.peak <= base
    assert gained > 3


NETWORKS = {
    "transformer": transformer(12),
    "transformer without dropout": transformer(12, dropout=False),
    "resnet": resnet((3, 4, 3), batch=16),
    "unet": unet(),
}


def block_checkpointing(problem: Problem, marks: list[int]) -> tuple[int, int]:
    """Peak and latency when each block keeps its output alone and is made again in the backward pass."""
    evaluator = Evaluator(problem, order_of(problem))
    flags = np.where(evaluator.step.redoable, RECOMPUTE, KEEP).astype(np.int8)
    flags[marks] = KEEP
    return evaluator.quick(flags)


@pytest.mark.parametrize("name", NETWORKS)
def test_at_the_peak_of_block_checkpointing_plans_cost_less_than_half(name: str) -> None:
    problem, marks = NETWORKS[name]
    base, latency = untouched(problem)
    peak, slow = block_checkpointing(problem, marks)
    assert peak < base
    result = checked(problem, search(problem, Objective(memory_limit=peak), budget=BUDGET))
    assert result.feasible
    assert result.latency_ns - latency < (slow - latency) / 2


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fifth_of_the_memory_costs_a_few_percent(name: str) -> None:
    problem, _ = NETWORKS[name]
    base, latency = untouched(problem)
    result = checked(problem, search(problem, Objective(memory_limit=base * 8 // 10), budget=BUDGET))
    assert result.feasible
    assert result.latency_ns <= latency * 1.05
    again = checked(problem, search(problem, Objective(latency_limit_ns=result.latency_ns), budget=BUDGET))
    assert again.feasible
    assert again.peak <= base * 0.82  # the other mode gets about as far


@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_swaps_hide_behind_computation(name: str) -> None:
    make = {"transformer": transformer, "resnet": resnet}[name]
    problem, _ = make(xfer_ns_per_byte=0.04, **({"layers": 8} if name == "transformer" else {"stages": (3, 4, 3)}))
    base, _ = untouched(problem)
    without = checked(problem, search(problem, Objective(memory_limit=base * 7 // 10), budget=BUDGET, allow_swap=False))
    with_swaps = checked(problem, search(problem, Objective(memory_limit=base * 7 // 10), budget=BUDGET))
    assert evaluate(problem, without.order, without.flags).swaps == 0
    assert evaluate(problem, with_swaps.order, with_swaps.flags).swaps > 0
    assert with_swaps.feasible
    assert with_swaps.latency_ns < without.latency_ns


def test_a_larger_budget_is_never_worse_and_a_budget_is_kept() -> None:
    problem, _ = NETWORKS["resnet"]
    base, _ = untouched(problem)
    limit = base * 45 // 100
    keys = []
    for budget in (1, 30, 300, 3000):
        result = checked(problem, search(problem, Objective(memory_limit=limit), budget=budget))
        assert result.states <= budget
        keys.append((max(result.peak, limit), result.latency_ns))
    assert keys == sorted(keys, reverse=True)
    assert keys[0] > keys[-1]


def test_more_memory_is_never_slower() -> None:
    problem, _ = NETWORKS["unet"]
    base, latency = untouched(problem)
    found = [search(problem, Objective(memory_limit=base * share // 100), budget=BUDGET) for share in (100, 90, 75, 60)]
    assert found[0].latency_ns == latency
    assert found[0].states == 1, "nothing to search when the limit is kept as it is"
    times = [result.latency_ns for result in found]
    assert times == sorted(times)


def test_a_limit_out_of_reach_is_said_to_be() -> None:
    problem, _ = NETWORKS["resnet"]
    result = checked(problem, search(problem, Objective(memory_limit=lower_bound(problem) - 1), budget=BUDGET))
    assert not result.feasible
    assert result.peak < untouched(problem)[0] * 0.5
    result = checked(problem, search(problem, Objective(latency_limit_ns=untouched(problem)[1] - 1), budget=500))
    assert not result.feasible
    assert result.latency_ns == untouched(problem)[1]


def test_seconds_are_an_extra_cap() -> None:
    problem, _ = NETWORKS["transformer"]
    base, _ = untouched(problem)
    result = checked(problem, search(problem, Objective(memory_limit=base // 2), over=Deadline(0.05).over))
    assert result.stopped_by_seconds
    assert not search(
        problem, Objective(memory_limit=base * 8 // 10), budget=200, over=Deadline(1000.0).over
    ).stopped_by_seconds


@pytest.mark.parametrize(
    "goal_of", [lambda peak, _: Objective(peak * 6 // 10), lambda _, ns: Objective(None, ns * 21 // 20)]
)
def test_a_search_from_plans_is_no_worse_than_they_are_and_repeats(goal_of: Callable[[int, int], Objective]) -> None:
    problem, _ = NETWORKS["resnet"]
    goal = goal_of(*untouched(problem))
    front = sweep(problem, BRIEF).points
    starts = around_best(front, goal)
    best = min(plan.key(goal) for plan in front)
    assert best in [plan.key(goal) for plan in starts]
    assert len(starts) < len(front)
    before = best
    for budget in (100, 1000, 5000):  # a larger budget is never worse
        found, again = (checked(problem, search(problem, goal, budget=budget, starts=starts)) for _ in range(2))
        assert found.key(goal) <= before
        assert (found.states, found.flags.tobytes()) == (again.states, again.flags.tobytes())
        before = found.key(goal)
    assert before < best


def test_a_front_without_plans_has_none_near_a_goal() -> None:
    assert around_best([], Objective(memory_limit=1)) == []


def test_no_cap_is_too_short_for_the_plan_to_begin_with() -> None:
    problem, _ = NETWORKS["unet"]
    result = checked(problem, search(problem, Objective(memory_limit=1), over=Deadline(-1.0).over))
    assert (result.states, result.stopped_by_seconds, result.feasible) == (1, True, False)


def test_bad_calls_are_refused() -> None:
    problem, _ = NETWORKS["unet"]
    with pytest.raises(UsageError, match="a memory limit or a latency limit"):
        search(problem, Objective())
    with pytest.raises(UsageError, match="not both"):
        search(problem, Objective(1, 1))
    for budget in (0, -1):
        with pytest.raises(UsageError, match=f"at least 1 state, not {budget}"):
            search(problem, Objective(memory_limit=1), budget=budget)


def digests() -> list[str]:
    """What searches of two networks find, under limits of either kind."""
    found = []
    for problem, _ in (resnet((2, 2), batch=8), transformer(3, xfer_ns_per_byte=0.05)):
        for goal in (Objective(problem.persistent_bytes + 150_000_000), Objective(None, 14_000_000)):
            result = search(problem, goal, budget=600)
            digest = hashlib.sha256(result.order.tobytes() + result.flags.tobytes()).hexdigest()
            found.append(f"{result.peak} {result.latency_ns} {result.states} {digest}")
    return found


def test_processes_agree_whatever_their_hash_seed(repository: Path) -> None:
    """This one has a seed of its own."""
    other = subprocess.run(
        [sys.executable, "-c", "from tests.search.test_search import digests; print(*digests(), sep='\\n')"],
        cwd=repository,
        env={**os.environ, "PYTHONHASHSEED": "1234"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.splitlines() == digests()


def test_a_limit_that_needs_a_tensor_made_again_twice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = perceptron(5)
    least, most = lower_bound(problem), sweep(problem, BRIEF).points[-1].peak
    goal = Objective(memory_limit=int(least + 0.4 * (most - least)))
    found = search(problem, goal, budget=BUDGET)
    assert found.feasible
    assert evaluate(problem, found.order, found.flags).peak == found.peak
    assert (found.flags == REPEAT).any()
    for module in (driver, moves):
        monkeypatch.setattr(module, "worth_repeating", lambda *_: False)
    assert not search(problem, goal, budget=BUDGET).feasible


def perceptron(layers: int) -> Problem:
    """A training step of equal layers, on a device without a link to the host."""
    module = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(512, 512), nn.Tanh())))
    batch, target = torch.zeros(4096, 512), torch.zeros(4096, 512)
    step = capture(module, (batch,), (target,), nn.functional.mse_loss, OptimizerSpec("sgd", lr=0.1)).graph
    costs = RooflineCosts(find_device("sim:rtx3090", ""), None, {})
    found: Problem = compile_problem(untangle(functionalize(step)), costs, reuse=True).problem
    return replace(found, xfer_ns_per_byte=0.0)
