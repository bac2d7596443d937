"""Loops beside swaps: no copy waits for another one, and figures count every part."""

from __future__ import annotations

import functools

import pytest

from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.cost.machines import machines
from magis.cost.profile_store import Profile
from magis.graph import Graph
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.fission_pareto import FissionPoint
from magis.search.loop_nest import realize_level
from magis.search.loop_places import divided_front
from magis.simulate.peak_breakdown import changes, repeats
from magis.simulate.simulator import rounded
from magis.simulate.timeline import elapsed_ns
from tests.search.subjects import BUDGET, step

SLACK = 0.2
COSTS = RooflineCosts(find_device("sim:rtx3090"), Profile({}, link=4 * 10**9, copy_ns=100), slack=SLACK)
"""A link as slow as the kernels of a small step are short."""


@functools.cache
def points() -> tuple[tuple[FissionPoint, Graph], ...]:
    """The fronts of two steps cut into parts where tensors may be swapped, with their graphs."""
    wanted = PlanRequest(Objective(memory_limit=0), 0, BUDGET)
    fronts = (divided_front(step(name).graph, COSTS, wanted, reuse=True) for name in ("blocks", "perceptron"))
    found = [point for front in fronts for point in front.points]
    return tuple((point, realize_level(point.level, point.solution())) for point in found)


def stores(graph: Graph) -> int:
    return sum(op.target == "magis.store" for op in graph.ops)


def test_copies_are_made_in_the_body_or_around_it() -> None:
    inside = [sum(stores(op.body.graph) for op in graph.ops if op.body is not None) for _, graph in points()]
    around = [stores(graph) for _, graph in points()]
    assert any(inside)
    assert any(around)


@pytest.mark.parametrize("number", range(4))
def test_no_step_waits_for_a_copy(number: int) -> None:
    machine = machines(COSTS.nominal, SLACK)[number]
    for point, graph in points():
        rounding = sum(1 if op.body is None else op.body.parts * len(op.body.graph.ops) for op in graph.ops)
        assert elapsed_ns(graph, machine) == pytest.approx(point.latency_ns * machine.kernels, abs=rounding)


def moved(graph: Graph, rounding: int) -> int:
    """Bytes that a step copies to the host, as an allocator rounds them."""
    total = 0
    for op in graph.ops:
        if op.body is not None:
            total += op.body.parts * moved(op.body.graph, rounding)
        elif op.target == "magis.store":
            total += rounded(graph.storages[graph.values[op.inputs()[0]].storage].nbytes, rounding)
    return total


def test_figures_count_every_part() -> None:
    for _, graph in points():
        assert sum(row.nbytes for row in changes(graph) if row.kind == "swapped") == moved(graph, 1)
        assert repeats(graph)[1] == moved(graph, 1)
