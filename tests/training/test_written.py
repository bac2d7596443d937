"""What a forward writes to: planning leaves it as it was, steps write as eager does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magis import optimize
from tests.training.loops import batch, loss_of, net
from tests.training.test_left_behind import ANY, MOMENTUM


class Auxiliary(nn.Module):
    """Leaves a tensor in an attribute, and one in an attribute of a layer, for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = net(depth=2), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[0](x)
        self.aux = x.square().mean()
        self.body[1].kept = self.aux * 2
        return self.body[1](x)

    def loss(self, y: Tensor, target: Tensor) -> Tensor:
        return loss_of(y, target) + 0.1 * self.aux + 0.1 * self.body[1].kept


class Reaching(nn.Module):
    """A loss that holds the model where it is no sub-module."""

    def __init__(self, model: Auxiliary) -> None:
        super().__init__()
        self.models = {"one": (model,)}

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return self.models["one"][0].loss(y, target)


def with_layer(layer: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, target: loss_of(y, target) + 0.1 * layer.kept


def with_default(model: Auxiliary) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(y: Tensor, target: Tensor, of: Auxiliary = model) -> Tensor:
        return of.loss(y, target)

    return loss


REACHING: dict[str, Callable[[Auxiliary], Callable[[Tensor, Tensor], Tensor]]] = {
    "bound method": lambda model: model.loss,
    "closure": lambda model: lambda y, target: 0.5 * model.loss(y, target),
    "closure of a layer": lambda model: with_layer(model.body[1]),
    "partial": lambda model: partial(Auxiliary.loss, model),
    "default": with_default,
    "container of a loss module": Reaching,
}


@pytest.mark.parametrize("reach", REACHING)
def test_a_loss_that_reaches_its_model_by_another_path(reach: str) -> None:
    """It finds what this step has left there, and nobody is warned."""
    model, twin = Auxiliary(), Auxiliary()
    ours, theirs = MOMENTUM(model.parameters()), MOMENTUM(twin.parameters())
    loss_fn = REACHING[reach](twin)
    step = optimize(model, batch(), REACHING[reach](model), ours, **ANY)
    for seed in range(3):
        x, target = batch(seed=seed)
        theirs.zero_grad()
        loss = loss_fn(twin(x), target)
        loss.backward()
        theirs.step()
        assert torch.equal(step(x, target), loss)
        assert torch.equal(model.aux, twin.aux)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
