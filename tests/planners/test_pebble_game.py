"""The pebble game: what it says has no schedule has none, whatever is recomputed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from benchmarks.lib.pebble_game import has_no_schedule
from magis.simulate.evaluator import evaluate
from magis.simulate.problem import Int8s, Int32s, NodeRow, Problem, StorageRow, build_problem
from tests.simulate.plans import plans
from tests.strategies import examples


@examples(60)
@given(plans(9))
def test_no_limit_that_a_plan_keeps_is_ruled_out(plan: tuple[Problem, Int32s, Int8s]) -> None:
    problem, order, flags = plan
    problem = replace(problem, xfer_ns_per_byte=0.0)  # storages in host memory are no part of the game
    for each in (flags, np.zeros_like(flags)):
        assert not has_no_schedule(problem, evaluate(problem, order, each).peak)


@pytest.mark.parametrize("layers", [2, 4, 6])
@pytest.mark.parametrize(("limit", "ruled_out"), [(30, False), (29, True)])
def test_layers_need_three_activations_however_often_each_is_made(layers: int, limit: int, ruled_out: bool) -> None:
    nodes = [NodeRow((at - 1,) if at else (), (at,), 1, redo_ns=1, redo_ok=True) for at in range(layers + 1)]
    nodes.append(NodeRow((layers,), (layers + 1,), 1))
    for at in range(layers - 1, -1, -1):
        gradient = 2 * layers - at
        nodes += [NodeRow((gradient, at), (gradient + layers + 1,), 1), NodeRow((gradient, at), (gradient + 1,), 1)]
    storages = [StorageRow(10)] * (2 * layers + 2) + [StorageRow(1, to_end=True)] * layers
    assert has_no_schedule(build_problem(nodes, storages), limit) == ruled_out
