"""What a forward writes to: planning leaves it as it was, steps write as eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, RMSprop

from magis import CaptureError, optimize
from tests.training.loops import BUDGET, Loops, batch, loss_of, net
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


class OfOneTensor(nn.Module):
    """Keeps several windows of one plain tensor, which is no buffer."""

    def __init__(self, windows: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.windows = nn.Linear(32, 32), windows(torch.randn(2, 32))

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.windows
        return torch.tanh(self.layer(x) * first + last)


@pytest.mark.parametrize(
    "windows",
    [Tensor.unbind, partial(torch.chunk, chunks=2), lambda whole: (whole.flatten()[:32], whole.flatten()[9:41])],
    ids=["unbound", "chunks", "overlapping"],
)
def test_windows_of_one_plain_tensor_are_read_as_in_eager_mode(
    windows: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    loops = Loops(OfOneTensor(windows), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    loops.agree()
    for each in (loops.module, loops.twin):
        each.windows[1].mul_(0.5)
    loops.agree()


class WritesAWindow(OfOneTensor):
    """Writes one window of a plain tensor and reads another one behind that."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.windows
        first.add_(1)
        return self.layer(x) * last.sum()


def test_a_window_of_what_the_step_wrote_is_refused_in_one_line() -> None:
    module = WritesAWindow(lambda whole: (whole.flatten()[:32], whole.flatten()[9:41]))
    with pytest.raises(CaptureError, match="of a written tensor is read; slice") as caught:
        optimize(module, batch(), loss_of, None, memory_ratio=1.0, budget=BUDGET)
    assert "\n" not in str(caught.value)
