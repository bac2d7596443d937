"""What a forward writes to: planning leaves it as it was, steps write as eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, RMSprop

from magis import CaptureError, optimize
from tests.training.loops import Loops, batch, loss_of, net
from tests.training.test_left_behind import ANY, MOMENTUM, Odd


class Scaling(nn.Module):
    """Counts, and writes over its batch, a weight and averages: a first call ahead of the capture would do so, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.calls = net(norm=True), nn.Parameter(torch.ones(32)), 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(3)
            self.scale.mul_(0.9)
        self.calls = self.calls + 1
        return self.body(x * self.scale)


def test_nothing_of_the_users_is_written_to_while_planning() -> None:
    module, example = Scaling(), batch()
    weights, given = copy.deepcopy((module.state_dict(), example))
    optimize(module, example, loss_of, None, memory_ratio=1.0, budget=1)
    assert module.calls == 0
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())
    assert all(map(torch.equal, example, given))


def test_a_network_without_tensors_has_nothing_to_train() -> None:
    with pytest.raises(CaptureError, match="there is nothing to train"):
        optimize(nn.Tanh(), batch(), loss_of, None, **ANY)


class Detached(Odd):
    """No gradient reaches a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).detach().requires_grad_()


@pytest.mark.parametrize("make", [MOMENTUM, RMSprop])
def test_an_optimizer_may_have_nothing_to_do(make: Callable[[Any], Any]) -> None:
    Loops(Detached(), make, memory_ratio=1.0).agree()


CENTER = torch.zeros(32)


def centered(out: Tensor, target: Tensor) -> Tensor:
    """A loss with a running mean in a global."""
    loss = loss_of(out - CENTER, target)
    with torch.no_grad():
        CENTER.mul_(0.9).add_(out.mean(0))
    return loss


def test_tensors_in_globals_are_written_to_by_steps_alone() -> None:
    CENTER.zero_()
    module = net()
    twin = copy.deepcopy(module)
    step = optimize(module, batch(), centered, SGD(module.parameters(), 0.1), memory_ratio=0.95, budget=20)
    assert not CENTER.any()
    ours = [step(*batch(seed=seed)) for seed in range(3)]
    kept = CENTER.clone()
    CENTER.zero_()
    optimizer = SGD(twin.parameters(), 0.1)
    for seed in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(seed=seed)
        loss = centered(twin(inputs), targets)
        loss.backward()
        optimizer.step()
        assert torch.equal(loss, ours[seed])
    assert torch.equal(CENTER, kept)


class CountingTwice(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1  # which registers the buffer again: no hook
        return self.body(x)


def test_a_buffer_may_be_counted_in_beside_a_number() -> None:
    loops = Loops(CountingTwice(), MOMENTUM)
    loops.agree()
    assert loops.module.calls == loops.twin.calls == 3
