"""The front of a model: plans that are realized, sound, and worth their place; they run with eager's numbers."""

from __future__ import annotations

import itertools

import pytest

import magis
from magis.cases.comparison import compare_by_kind
from magis.extensions.models.network_names import GATE_NAMES, SEED_NAMES
from magis.graph import Graph, verify
from magis.planner import planning
from magis.planner.bench import Bench
from magis.planner.fronts import MEMORY, realized_front
from magis.planner.plans import ENOUGH
from magis.results import Case
from magis.rewrite.rules.merged_weights import MERGED
from magis.search.budgeted_evaluator import Objective

BLOCKS = "tests.api.nets:few_blocks"
PROJECTED = "tests.api.nets:projected"


@pytest.mark.parametrize(("model", "device"), [(BLOCKS, "cpu"), ("seed-unet", "sim:rtx3090")])
def test_a_front_is_monotone_and_between_the_bound_and_eager(model: str, device: str) -> None:
    front = magis.pareto(model, device=device, preset="small", points=10, budget=12_000)
    assert (front.model, front.device, front.preset, front.dtype) == (model, device, "small", "float32")
    assert 4 < len(front.points) <= 10
    for lean, wide in itertools.pairwise(front.points):
        assert lean.peak_bytes < wide.peak_bytes
        assert lean.latency_ms > wide.latency_ms
    assert front.lower_bound_bytes <= front.points[0].peak_bytes < 0.8 * front.original.peak_bytes
    assert front.points[-1].latency_ms <= front.original.latency_ms * 1.001
    again = magis.pareto(model, device=device, preset="small", points=10, budget=12_000)
    assert (again.points, again.states) == (front.points, front.states)


@pytest.mark.parametrize(
    ("model", "points"),
    [(BLOCKS, 6), *(pytest.param(name, 16, marks=pytest.mark.soak) for name in (*GATE_NAMES, *SEED_NAMES))],
)
def test_every_plan_of_a_front_runs_in_its_bytes_with_eagers_numbers(model: str, points: int) -> None:
    subject = Bench().subject(Case(model, "magis", "cpu", "small"))
    found, _ = realized_front(subject, points=points)
    assert len(found) > points // 2
    for plan in found:
        verify(plan.graph)
        eager, step = subject.eager(), subject.generated(plan.graph)
        numbers = compare_by_kind(subject, plan.graph, eager, step, 0)
        assert numbers == ("within tolerance" if plan.fission else "bit-identical")
        assert subject.measure(step) == subject.simulate_graph(plan.graph) == plan.planned


def test_plans_of_merged_calls_run_in_their_bytes_with_eagers_numbers() -> None:
    subject = Bench().subject(Case(PROJECTED, "magis", "cpu", "small"))
    assert products(subject.aggregated) == products(subject.untangled) - 3 * 2
    found, _ = realized_front(subject, points=16)
    merged = [plan for plan in found if any(name.startswith(MERGED) for name in names(plan.graph))]
    assert len(merged) > 2
    for plan in merged:
        assert plan.fission
        step = subject.generated(plan.graph)
        assert compare_by_kind(subject, plan.graph, subject.eager(), step, 0) == "within tolerance"
        assert subject.measure(step) == subject.simulate_graph(plan.graph) == plan.planned


def test_a_front_is_no_worse_than_a_search_for_a_limit_that_is_asked_for_most() -> None:
    budget = 12_000
    subject = Bench().subject(Case(PROJECTED, "magis", "sim:rtx3090", "small"))
    front = realized_front(subject, budget=budget, points=32)[0]
    for ratio in MEMORY:
        goal = Objective(memory_limit=int(ratio * subject.original.peak_bytes))
        case = planning.plan(
            subject,
            memory_limit=goal.memory_limit,
            latency_limit_ns=None,
            budget=budget,
            seconds=None,
            seed=0,
            stored=None,
        )
        best = min(goal.key(point.peak, point.latency_ns) for point in front)
        assert best <= goal.key(case.peak, int(ENOUGH * max(case.latency_ns, subject.original_ns)))
        if case.latency_ns > ENOUGH * subject.original_ns:
            assert best <= goal.key(case.peak, case.latency_ns)


def test_a_cap_on_seconds_leaves_a_front_of_what_was_found() -> None:
    cache = Bench()
    capped, longer, full = (
        magis.pareto(PROJECTED, device="sim:rtx3090", preset="small", seconds=seconds, cache=cache)
        for seconds in (1e-6, 0.5, None)
    )
    assert capped.states < full.states
    assert longer.states <= full.states
    for front in (capped, longer):
        assert front.points
        for point in front.points:
            assert any(
                better.peak_bytes <= 1.01 * point.peak_bytes and better.latency_ms <= 1.01 * point.latency_ms
                for better in full.points
            )
        assert front.points[-1].latency_ms <= full.original.latency_ms * 1.001


def products(graph: Graph) -> int:
    return sum("addmm" in op.target for op in graph.ops)


def names(graph: Graph) -> list[str]:
    return [graph.values[value].name for value in graph.inputs]


def test_fission_is_on_the_front_where_a_device_gains_by_it() -> None:
    front = magis.pareto("seed-unet", device="sim:rtx3090", preset="small", points=12)
    assert any(point.fission for point in front.points)
    leanest = front.best(latency_ratio=3.0)
    assert leanest is not None
    assert leanest.fission
