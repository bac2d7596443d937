"""No plan, in any order, with any recomputation, swap or loop, is below the bound of its latency."""

from __future__ import annotations

import ctypes
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import magis
from magis.planner.bench import Bench
from magis.quiet import stdout_dropped
from magis.results import Case
from magis.search.latency_bound import NEVER, bound_at, latency_lower_bound, nest_latency_bound
from magis.simulate.evaluator import Evaluator, lower_bound
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, SWAP, NodeRow, Problem, StorageRow, build_problem
from tests.search.networks import transformer
from tests.search.subjects import front_of, step
from tests.simulate.plans import problems, random_order
from tests.strategies import examples, random_flags


def some_plans(problem: Problem, seed: int, orders: int, flags: int) -> list[tuple[int, int]]:
    """Peak and latency of random plans that no other of them beats, leanest first."""
    rng = np.random.default_rng(seed)
    found: set[tuple[int, int]] = set()
    for number in range(orders):
        order = random_order(problem, rng) if number else np.arange(problem.n_nodes, dtype=np.int32)
        evaluator = Evaluator(problem, order)
        found |= {evaluator.quick(random_flags(problem, rng)) for _ in range(flags)}
    return undominated(found)


def undominated(plans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that no other one beats in both, leanest first."""
    best: list[tuple[int, int]] = []
    for plan in sorted(plans):
        if not best or plan[1] < best[-1][1]:
            best.append(plan)
    return best


@examples(60)
@given(problems(16), st.integers(0, 2**32 - 1))
def test_no_plan_of_a_random_step_is_faster_than_its_bound(problem: Problem, seed: int) -> None:
    plans = some_plans(problem, seed, 3, 20)
    for peak, latency_ns in plans:
        assert latency_lower_bound(problem, peak) <= latency_ns
        found = bound_at(problem, peak)
        assert found is not None
        for other_peak, other_ns in plans:  # of one limit at every other
            assert found.ns - found.per_byte * (other_peak - peak) <= other_ns + 1


def training_step(seed: int, layers: int) -> Problem:
    """Layers of random sizes and times, and their way back; gradients of the weights may come at any time."""
    draw = np.random.default_rng(seed)
    nodes = [
        NodeRow((k - 1,) if k else (), (k,), ns, redo_ns=ns, redo_ok=True)
        for k, ns in enumerate(draw.integers(1, 50, layers).tolist())
    ]
    sizes = draw.integers(1, 20, layers).tolist()
    for k in reversed(range(layers)):
        gradient = [len(sizes) - 1] if k < layers - 1 else []
        nodes.append(NodeRow((k, *gradient), (len(sizes),), 10, ws=int(draw.integers(3))))
        sizes.append(int(draw.integers(1, 5)))
    return build_problem(nodes, [StorageRow(512 * size) for size in sizes])


def optimum(problem: Problem, limit: int) -> int | None:
    """The least latency within a limit, of all orders and recomputations, as often as one likes, without swaps."""
    done = 0, frozenset[int]()
    every = (1 << problem.n_nodes) - 1
    costs = {done: 0}
    heap: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    while heap:
        cost, ran, held = heapq.heappop(heap)
        state = ran, frozenset(held)
        if costs[state] < cost:
            continue
        if ran == every:
            return cost
        for time, after, kept in _following(problem, limit, ran, state[1]):
            if cost + time < costs.get((after, kept), NEVER):
                costs[after, kept] = cost + time
                heapq.heappush(heap, (cost + time, after, tuple(sorted(kept))))
    return None


def _following(
    problem: Problem, limit: int, ran: int, held: frozenset[int]
) -> Iterator[tuple[int, int, frozenset[int]]]:
    """What may happen next: a tensor goes, or a node runs."""
    yield from ((0, ran, held - {tensor}) for tensor in held)
    for node in range(problem.n_nodes):
        first = not ran >> node & 1
        inputs, outputs = problem.inputs(node).tolist(), problem.outputs(node).tolist()
        if not held.issuperset(inputs) or not (first or problem.redo_ok[node]) or held.issuperset(outputs):
            continue
        after = held.union(outputs)
        needed = int(problem.nbytes[sorted(after)].sum() + (problem.node_ws if first else problem.redo_ws)[node])
        if needed + problem.persistent_bytes <= limit:
            yield int((problem.node_ns if first else problem.redo_ns)[node]), ran | 1 << node, after


@pytest.mark.parametrize("link", [0.0, 0.003, 0.01, 0.03])
def test_no_choice_of_copies_and_recomputations_is_faster_than_the_bound(link: float) -> None:
    """Every choice for the tensors of the forward pass, in program order and others; many reach the bound."""
    equal = total = 0
    for seed in range(4):
        problem = replace(training_step(seed, 4), xfer_ns_per_byte=link)
        rng = np.random.default_rng(seed)
        orders = [np.arange(problem.n_nodes, dtype=np.int32), *(random_order(problem, rng) for _ in range(3))]
        found: set[tuple[int, int]] = set()
        for order in orders:
            evaluator = Evaluator(problem, order)
            for chosen in itertools.product((KEEP, RECOMPUTE, SWAP), repeat=4):
                flags = np.full(problem.n_storages, DROP, dtype=np.int8)
                flags[:4] = chosen
                found.add(evaluator.quick(flags))
        for peak, latency_ns in undominated(found):
            bound = latency_lower_bound(problem, peak)
            assert bound <= latency_ns
            equal += bound == latency_ns
            total += 1
    assert 4 * equal > total > 8


def test_the_bound_is_below_the_optimum_of_small_steps_and_often_equals_it() -> None:
    """The optimum is that of an exhaustive search, in which nothing is like our search, or like the evaluator."""
    equal, dear = 0, 0
    for seed in range(8):
        problem = training_step(seed, 4)
        evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
        peak, base = evaluator.quick(np.full(problem.n_storages, DROP, dtype=np.int8))
        floor = lower_bound(problem)
        for limit in np.linspace(floor, peak, 6, dtype=np.int64).tolist():
            best, bound = optimum(problem, limit), latency_lower_bound(problem, limit)
            assert bound >= base
            if best is None:
                continue
            assert bound <= best
            equal += bound == best > base
            dear += best > base
    assert equal > 0.8 * dear > 20


@pytest.mark.parametrize("link", [0.0, 0.02, 0.2])
def test_plans_of_a_transformer_are_no_faster_than_their_bound(link: float) -> None:
    problem = transformer(2, batch=2, xfer_ns_per_byte=link)[0]
    plans = some_plans(problem, 1, 3, 60)
    base = int(problem.node_ns.sum() + problem.blk_ns.sum())
    bounds = [latency_lower_bound(problem, peak) for peak, _ in plans]
    assert all(base <= bound <= latency_ns for bound, (_, latency_ns) in zip(bounds, plans, strict=True))
    assert bounds[0] > base or link
    assert latency_lower_bound(problem, lower_bound(problem) - 1) == NEVER
    assert latency_lower_bound(problem, 1 << 50) == base


@pytest.mark.parametrize("name", ["blocks", "seed-unet"])
def test_plans_with_a_loop_are_no_faster_than_the_bound_of_the_step_as_cut(name: str) -> None:
    points = front_of(step(name)).points
    lifted = 0
    for point in points[:: max(1, len(points) // 4)]:
        nest = point.level
        bound = nest_latency_bound(nest, point.peak)
        assert bound <= point.latency_ns
        lifted += bound > nest_latency_bound(nest, 1 << 50)
        assert nest_latency_bound(nest, point.peak // 4) >= bound
    assert lifted


def test_a_case_on_a_simulated_device_says_its_bound() -> None:
    """Also where the paper's search has planned it; not where the limit is missed, or the device is real."""
    bench = Bench()
    found = [magis.run_case(case, cache=bench) for case in cases()]
    bounds = [result.latency_ratio_bound for result in found]
    assert [bound is not None for bound in bounds] == [True, True, True, False]
    for result, bound in zip(found, bounds, strict=True):
        assert bound is None or 1.0 - 1e-3 <= bound <= result.latency_ratio


def cases() -> Sequence[Case]:
    usual = Case("mlp", "magis", "sim:rtx3090", "small", budget=300)
    return (
        replace(usual, memory_ratio=0.8),
        replace(usual, latency_ratio=2.0),
        replace(usual, memory_ratio=0.9, search="paper", budget=60),
        replace(usual, memory_ratio=0.01),
    )


def test_what_native_code_prints_is_dropped_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    native = ctypes.CDLL(None)
    native.printf(b"before\n")
    with stdout_dropped():
        native.printf(b"a debugging line\n")
    native.printf(b"behind\n")
    native.fflush(None)
    assert capfd.readouterr().out == "before\nbehind\n"
