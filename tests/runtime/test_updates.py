"""Steps whose optimizer updates by lists or fused, as the user asked for: bytes and numbers are eager's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import nn
from torch.nn import functional as F  # noqa: N812

from magis.capture import capture
from magis.graph import verify
from magis.ops.optimizers import OptimizerSpec
from magis.rewrite.functionalize import functionalize
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.problem import KEEP, RECOMPUTE
from magis.simulate.simulator import replay
from tests.nets import OPTIMIZERS, Built, Net, rows
from tests.oracles import Costs, captured, differences, eager_step, graph_step, history, measured, workspaces

UPDATES = {name: rule for name, rule in OPTIMIZERS.items() if rule.kind not in ("gradients", "none")}
SETTINGS = [{"foreach": True}, {"fused": True}]


def built(rule: OptimizerSpec) -> Built:
    """Weights that are far larger than activations, so that the peak lies in the update."""
    body = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64, bias=False), nn.Linear(64, 32)]
    return Net(lambda: nn.Sequential(*body), rows(2, 64), rows(2, 32), F.mse_loss, rule).build()


@pytest.mark.parametrize("setting", SETTINGS, ids="".join)
@pytest.mark.parametrize("name", UPDATES)
def test_what_the_user_sets_is_simulated_to_the_byte_and_planned_with_eagers_numbers(
    name: str, setting: dict[str, bool]
) -> None:
    net = built(replace(UPDATES[name], **setting))
    found = captured(net)
    step = found.original
    profile = replay(step.graph, workspaces().of(step.graph), deaths=step.deaths, numbers=step.numbers)
    assert (profile.peak_bytes, profile.tensor_bytes) == measured(eager_step(net), step.graph.persistent_bytes())
    assert differences(history(eager_step(net)), history(graph_step(found.graph, net))) == []


@pytest.mark.parametrize("name", UPDATES)
def test_the_short_lists_of_a_step_for_a_gpu_float(name: str) -> None:
    """They are blocks of the search, as single weights are; lists on a CPU compute what the loop does."""
    net = built(UPDATES[name])
    found = capture(net.module, net.inputs, net.targets, net.loss_fn, net.rule, device="cuda")
    assert any(op.target.startswith("aten._foreach_") for op in found.graph.ops)
    compiled = compile_problem(functionalize(found.graph), Costs(found.graph))
    assert 1 < compiled.problem.n_blocks <= 7
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    eager = history(eager_step(net))
    for flag in (KEEP, RECOMPUTE):
        flags = np.full(compiled.problem.n_storages, flag, dtype=np.int8)
        graph = realize(compiled, expand(compiled.problem, order, flags))
        verify(graph)
        assert differences(eager, history(graph_step(graph, net))) == []
