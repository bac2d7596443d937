"""The loss that ranks compute together, each of its share of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from magis.capture.workload import Workload
from magis.ops.optimizers import OptimizerSpec
from magis.strategies.rank_step import loss_of_shares


def work(*between: nn.Module) -> Workload:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 4))
    return Workload(
        "net", module, (torch.randn(12, 8),), (torch.randn(12, 4),), nn.functional.mse_loss, OptimizerSpec("sgd")
    )


def by_hand(given: Workload, count: int) -> list[float]:
    (x,), (y,) = given.inputs, given.targets
    parts = zip(x.chunk(count), y.chunk(count), strict=True)
    return [float(given.loss_fn(given.module(a), b).detach()) for a, b in parts]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_are_normalized_one_by_one(count: int) -> None:
    normalized = work(nn.BatchNorm1d(16))
    expected = by_hand(normalized, count)
    whole = float(by_hand(normalized, 1)[0])
    found = float(loss_of_shares(normalized, count)().detach())
    assert found == pytest.approx(sum(expected) / count, rel=1e-6)
    assert (abs(found / whole - 1) < 1e-6) == (count == 1), "the batch as a whole is normalized in another way"


def test_without_batch_norm_it_is_the_loss_of_the_batch_and_so_are_the_gradients() -> None:
    given = work(nn.ReLU())
    loss = loss_of_shares(given, 4)()
    assert float(loss.detach()) == pytest.approx(by_hand(given, 1)[0], rel=1e-6)
    loss.backward()
    found = [parameter.grad for parameter in given.module.parameters()]
    given.module.zero_grad(set_to_none=True)
    given.loss_fn(given.module(*given.inputs), *given.targets).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in given.module.parameters()])
