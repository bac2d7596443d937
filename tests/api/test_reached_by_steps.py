"""`magis.estimate(step, batch)`: what a step function reaches stays as it was, and mistakes end in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import magis
from magis.errors import UsageError
from tests.api.own_loops import batch, clipped, net

F = nn.functional


class Meter:
    def __init__(self) -> None:
        self.count, self.last = 0, torch.ones(2)


class Averaging(nn.Module):
    """It replaces a buffer and a tensor in an attribute in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count, self.plain = nn.Linear(32, 32), 0, torch.ones(2)
        self.register_buffer("average", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * y.mean(0).detach()
        self.plain, self.count = self.plain * 0.5, self.count + 1
        return y


METER, HISTORY, BOX, AVERAGING = Meter(), list[int](), {"mean": torch.ones(2)}, Averaging()
OPTIMIZER = torch.optim.SGD(AVERAGING.parameters(), lr=0.1)


def step_on_globals(given: tuple[Tensor, Tensor]) -> None:
    loss = F.mse_loss(AVERAGING(given[0]), given[1])
    loss.backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()
    METER.count, METER.last = METER.count + 1, loss.detach()
    BOX["mean"] = 0.9 * BOX["mean"]
    HISTORY.append(1)
    HISTORY.pop()


def test_objects_that_globals_hold_are_as_before() -> None:
    assert magis.estimate(step_on_globals, batch(), device="cpu").peak_bytes > 0
    assert (METER.count, AVERAGING.count, HISTORY) == (0, 0, [])
    assert [float(each.sum()) for each in (METER.last, BOX["mean"], AVERAGING.plain, AVERAGING.average)] == [
        2,
        2,
        2,
        32,
    ]


def test_a_step_may_measure_itself_and_hold_estimates() -> None:
    """Names of the program's own modules stay, though functions of theirs are reached."""
    known: dict[str, Any] = {"before": None, "MISSING": None}
    step, given = clipped()

    def measuring(part: Any) -> None:
        with magis.peak("cpu", after=known["before"]) as known["before"]:
            step(part)

    found = [magis.estimate(measuring, given, device="cpu") for _ in range(2)]
    known["MISSING"] = found[0]
    found.append(magis.estimate(measuring, given, device="cpu"))
    assert len({each.peak_bytes for each in found}) == 1


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (lambda step, part: magis.estimate(step), "a function without a batch: missing a required argument: 'given'"),
        (lambda step, part: magis.estimate(step, batches=[]), "batches is empty; give a module or"),
        (lambda step, part: magis.estimate(step, part, batches=[part]), "there are both batch and batches; give"),
        (lambda step, part: magis.estimate(step, batches=3), "batches is a int; give a module or"),
        (lambda step, part: magis.estimate("bert", batches=[part]), "several for a str; give a module or"),
        (lambda step, part: magis.estimate(net(), batches=[part], loss=F.mse_loss, dtype="bfloat16"),
         "several batches of a module run as its plain step; leave out"),
        (lambda step, part: magis.estimate(step, part, device="sim:h100", allocator=5), "allocator: a int; give text"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(asked: Callable[[Any, Any], object], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        asked(*clipped())


class Drawing(nn.Module):
    """Holds a function that Cython made: the metaclass of its class keeps no name of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.draws = nn.Linear(8, 8), np.random.Generator.standard_normal
        self.kind = type(type(self.draws))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.layer(x) if callable(self.draws) and self.kind else x)


def test_functions_of_cython_may_be_held() -> None:
    net, given = Drawing(), (torch.randn(4, 8), torch.randn(4, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(part: tuple[Tensor, Tensor]) -> None:
        F.mse_loss(net(part[0]), part[1]).backward()
        optimizer.step()

    assert magis.estimate(net, given, F.mse_loss, optimizer, device="cpu").peak_bytes > 0
    assert magis.estimate(step, given, device="cpu").peak_bytes > 0
    assert magis.optimize(net, given, F.mse_loss, optimizer, memory_ratio=1.0, budget=1)(*given) > 0
