"""Tables that `functools.lru_cache` keeps from the first step on: no capture leaves one without contents there."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from magis import optimize, run_case
from magis.api import Bench
from magis.capture import OptimizerSpec, capture, python_state
from magis.cases.check import check_case
from magis.models import from_function
from magis.results import Case
from tests.training.loops import batch, loss_of, net


class Waves(nn.Module):
    @functools.lru_cache(maxsize=4)  # noqa: B019  (as libraries do it)
    def forward(self, rows: int, width: int) -> Tensor:
        return torch.linspace(0, 3, rows * width).reshape(rows, width).sin()


class Positioned(nn.Module):
    """Adds a table that its first step makes."""

    def __init__(self) -> None:
        super().__init__()
        self.waves, self.body = Waves(), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.waves(*x.shape))


def test_a_capture_leaves_nothing_in_caches() -> None:
    module, (inputs, targets) = Positioned(), batch()
    found = capture(module, (inputs,), (targets,), loss_of, OptimizerSpec("gradients"))
    assert found.left == ("the caches of functools",)
    table = module.waves(*inputs.shape)
    assert torch.equal(table, torch.linspace(0, 3, inputs.numel()).reshape(inputs.shape).sin())
    again = capture(module, (inputs,), (targets,), loss_of, OptimizerSpec("gradients"))
    assert not again.left
    assert [*again.cached] == ["cached:0"]
    assert torch.equal(again.cached["cached:0"], table)
    assert module.waves(*inputs.shape) is table


def test_caches_that_the_collector_passes_over_are_seen() -> None:
    module, (inputs, targets) = Positioned(), batch()
    gc.freeze()
    found = capture(module, (inputs,), (targets,), loss_of, OptimizerSpec("gradients"))
    assert found.left == ("the caches of functools",)


def test_no_object_is_looked_at_where_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than to capture a small network."""
    looks: list[type] = []
    monkeypatch.setattr(python_state, "objects_of", lambda kind: looks.append(kind) or [])
    (inputs, targets), module = batch(), net()
    capture(module, (inputs,), (targets,), loss_of, OptimizerSpec("gradients"))
    optimize(module, (inputs, targets), loss_of, SGD(module.parameters(), 0.1), memory_ratio=1.0, budget=1)
    case = Case("plain", "magis", "cpu", "small", memory_ratio=1.0, budget=1, timing_rounds=1)
    run_case(case, cache=Bench(), make=from_function("plain", lambda: (net(), batch(), loss_of)), rough=True)
    assert not looks
    capture(Positioned(), (inputs,), (targets,), loss_of, OptimizerSpec("gradients"))
    assert len(looks) == 1


def test_the_gate_counts_the_table() -> None:
    case = Case("cached", "magis", "cpu", "small", memory_ratio=0.95, budget=100, timing_rounds=1)
    make, bench = from_function("cached", lambda: (Positioned(), batch(), loss_of)), Bench()
    check_case(case, cache=bench, make=make)
    result = run_case(case, cache=bench, make=make, rough=True)
    assert (result.numbers, result.conformance) == ("bit-identical", "whole step")
    for step in (result.original, result.optimized):
        assert step.measured is not None
        assert step.simulated.peak_bytes == step.measured.peak_bytes
