"""Pictures at batch 1, in parts along height or width: from the last overlapping windows to the loss and back."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from magis.capture import capture
from magis.capture.workload import fake_tensors
from magis.cost.cost_model import device_model
from magis.fission import region
from magis.fission.loss_suffix import axes
from magis.fission.proof import verify_fission
from magis.graph import verify
from magis.graph.loop_rules import JOIN, PART, rows_around
from magis.ops.optimizers import OptimizerSpec
from magis.ops.splits import convolution
from magis.ops.splits.labels import Around, LabelledCall, Labels, Places, Rule
from magis.planner.fission_plan import Divided, divide
from magis.rewrite.functionalize import functionalize, untangle
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.driver import search
from magis.search.loop_nest import realize_level
from magis.search.loop_places import divided_front
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.simulator import replay
from tests.fission.halo_nets import large_convnext, large_super_resolution, squared
from tests.search.subjects import Step

BUDGET = 1000
SLOWER = 1.3
COSTS = device_model("sim:rtx3090")
MODELS = {"convnext": large_convnext, "super-resolution": large_super_resolution}


@functools.cache
def step(name: str) -> Step:
    """A step on a simulated RTX 3090."""
    with fake_tensors():
        module, inputs, targets, _ = MODELS[name]()
    graph = capture(module, inputs, targets, squared, OptimizerSpec("sgd", lr=0.01), device="sim:rtx3090").graph
    graph = untangle(functionalize(graph))
    compiled = compile_problem(graph, COSTS, reuse=True)
    free = search(compiled.problem, Objective(memory_limit=1 << 62), budget=1, seed=0)
    return Step(graph, COSTS, compiled, free.peak, free.latency_ns)


def planned(given: Step) -> tuple[Divided | None, int]:
    """The best plan in parts, and the peak of the best one without."""
    goal = Objective(latency_limit_ns=int(SLOWER * given.latency_ns))
    whole = given.whole(goal)
    known = (whole.peak, whole.latency_ns)
    wanted = PlanRequest(goal, 0, BUDGET)
    front = divided_front(given.graph, given.costs, wanted, reuse=True)
    return divide(front, wanted, known=known), whole.peak


kept_plan = functools.cache(planned)


def without_halos(rule: Rule) -> Rule:
    """The rule's labels but for those of windows that overlap."""

    def labels(call: LabelledCall) -> Labels | str:
        found = rule(call)
        if isinstance(found, str):
            return found
        everything = [*found.inputs.values(), *found.outputs]
        gone = {dim.label for dims in everything for dim in dims if isinstance(dim, Around)}

        def kept(dims: Places) -> Places:
            return [None if isinstance(dim, Around) or dim in gone else dim for dim in dims]

        return replace(
            found,
            inputs={path: kept(dims) for path, dims in found.inputs.items()},
            outputs=[kept(dims) for dims in found.outputs],
        )

    return labels


@pytest.mark.parametrize("name", MODELS)
def test_a_picture_in_parts_needs_less(name: str) -> None:
    given = step(name)
    found, whole = kept_plan(given)
    assert found is not None
    assert found.solution.peak < 0.8 * whole
    assert found.solution.latency_ns <= SLOWER * given.latency_ns
    verify_fission(found.level.compiled.graph, given.graph)
    graph = realize_level(found.level, found.solution)
    verify(graph)
    verify_fission(graph)
    assert replay(graph, COSTS.workspace, rounding=COSTS.rounding).peak_bytes == found.solution.peak
    (loop,) = (op.body for op in graph.ops if op.body is not None)
    around = {op.target for op in loop.graph.ops if any(rows_around(op))}
    assert around == {PART, JOIN}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_halo_that_does_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = step(name)
    with_halos, whole = kept_plan(given)
    # The cache holds splits that were found with these rules.
    monkeypatch.setattr(region, "_cached_splits", region._cached_splits.__wrapped__)
    for operator in ("convolution", "convolution_backward"):
        monkeypatch.setattr(convolution, operator, without_halos(getattr(convolution, operator)))
    without, again = planned(given)
    assert again == whole
    assert with_halos is not None
    assert with_halos.solution.peak < 0.9 * min(whole, without.solution.peak if without is not None else whole)


@pytest.mark.parametrize("name", MODELS)
def test_height_and_width_are_the_axes_of_a_single_picture(name: str) -> None:
    graph = step(name).graph
    (picture,) = (value for value in graph.inputs if graph.values[value].name == "input:0")
    assert [axis.dims[picture] for axis in axes(graph)] == [2, 3]
