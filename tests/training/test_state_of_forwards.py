"""Forwards that take something from one step to the next, or draw on the host: one plan, with eager's bits."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional

import magis
from magis.errors import CaptureError
from magis.frontends import planned
from magis.frontends.audits import Audits

OTHER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.37)
SCHEDULE = torch.optim.lr_scheduler.ExponentialLR(OTHER, 0.97)


@pytest.fixture(autouse=True)
def audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit every step for which audits are due at all: none of these is another one than was planned."""

    def schedule(self: Audits) -> None:
        self.due = 0.0 if self.costs < math.inf else self.costs

    monkeypatch.setattr(Audits, "_schedule", schedule)


class Net(nn.Module):
    """Two layers, with something in between that keeps or draws something."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.between = nn.Linear(16, 32), nn.Linear(32, 5), between
        self.teacher = copy.deepcopy(self.one).requires_grad_(False)
        self.register_buffer("center", torch.zeros(32))
        self.register_buffer("other", torch.ones(32))
        self.mean, self.count, self.heat = torch.zeros(32), 3, 5.0
        self.quantize = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.two(self.between(self, torch.tanh(self.one(x))))


class Centered(nn.Module):
    """A loss that keeps a centre, and maybe a trained scale."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.center, self.steps = torch.zeros(5), 0
        self.scale = nn.Parameter(torch.ones(())) if trained else 1.5

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        loss = functional.cross_entropy((out - self.center) * self.scale / math.sqrt(self.steps + 2), y)
        self.center = self.center * 0.9 + out.detach().mean(0) * 0.1
        return loss


def trained(
    between: Callable[[Net, Tensor], Tensor],
    loss: Any = functional.cross_entropy,
    change: Callable[[Net, int], Any] = lambda _net, _step: None,
    steps: int = 8,
    example: Callable[[int], Any] = lambda _step: (torch.randn(8, 16), torch.randint(0, 5, (8,))),
    monkeypatch: pytest.MonkeyPatch | None = None,
) -> tuple[magis.OptimizedStep, list[int]]:
    """Train beside eager: all that modules hold and all generators are the same after each step."""
    captures: list[int] = [0]
    seen = planned.captured_step

    def captured(*args: Any, **keywords: Any) -> Any:
        captures[-1] += 1
        return seen(*args, **keywords)

    if monkeypatch is not None:
        monkeypatch.setattr(planned, "captured_step", captured)
    ours = Net(between)
    theirs, losses = copy.deepcopy(ours), (loss, copy.deepcopy(loss))
    optimizers = []
    for net, function in zip((ours, theirs), losses, strict=True):
        more = function.parameters() if isinstance(function, nn.Module) else ()
        optimizers.append(torch.optim.SGD([*net.parameters(), *more], lr=0.1, momentum=0.9))
    batches = [example(index) for index in range(steps)]
    seeded(9)
    step = magis.optimize(ours, batches[0], losses[0], optimizers[0], latency_ratio=1.5, budget=40)
    assert held((ours, losses[0])) == held((theirs, losses[1]))
    captures.clear()
    for index, (x, y) in enumerate(batches):
        captures.append(0)
        change(ours, index)
        change(theirs, index)
        seeded(index)
        result = step(x, y)
        after = drawn()
        seeded(index)
        eager = losses[1](theirs(x), y)
        eager.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(result, eager.detach()), f"step {index}"
        assert held((ours, losses[0])) == held((theirs, losses[1])), f"step {index}"
        assert after == drawn(), f"step {index}"
    return step, captures


def held(roots: tuple[Any, ...]) -> dict[str, Any]:
    """Tensors and numbers that modules hold, by name."""
    found: dict[str, Any] = {}
    for number, root in enumerate(roots):
        for path, part in root.named_modules() if isinstance(root, nn.Module) else ():
            for name, value in {**vars(part), **part._parameters, **part._buffers}.items():
                if isinstance(value, (int, float)):
                    found[f"{number} {path}.{name}"] = type(value), value
                elif isinstance(value, Tensor) and name != "x":
                    found[f"{number} {path}.{name}"] = value.tolist()
    return found


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (what users draw from)
    torch.manual_seed(seed)


def drawn() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()  # noqa: NPY002


def rebound(net: Net, h: Tensor) -> Tensor:
    shifted = h - net.center
    net.center = net.center * 0.9 + h.detach().mean(0) * 0.1
    return shifted


def attribute(net: Net, h: Tensor) -> Tensor:
    net.mean = 0.8 * net.mean + 0.2 * h.detach().mean(0)
    return h / (net.mean.abs() + 1)


def two_at_once(net: Net, h: Tensor) -> Tensor:
    net.center, net.mean = net.mean + h.detach().mean(0), net.center * 0.5
    return h - net.center + net.mean


def part_of_more(net: Net, h: Tensor) -> Tensor:
    net.mean = torch.stack((h.detach().amax(0), net.mean * 0.9 + h.detach().mean(0)))[1]
    return h - net.mean


def read_before_and_after(net: Net, h: Tensor) -> Tensor:
    first = h - net.other
    net.other = net.other + h.detach().amax(0)
    net.other = net.other * 0.5
    return first * net.other


@torch.no_grad()
def averaged_data(net: Net) -> None:
    for ours, theirs in zip(net.one.parameters(), net.teacher.parameters(), strict=True):
        theirs.data = theirs.data * 0.9 + ours.data * 0.1


@torch.no_grad()
def averaged_in_place(net: Net, share: float = 0.9) -> None:
    for ours, theirs in zip(net.one.parameters(), net.teacher.parameters(), strict=True):
        theirs.mul_(share).add_(ours, alpha=1 - share)


def taught(average: Callable[[Net], None]) -> Callable[[Net, Tensor], Tensor]:
    def between(net: Net, h: Tensor) -> Tensor:
        average(net)
        with torch.no_grad():
            teacher = net.teacher(net.x)
        return h * torch.sigmoid(teacher)

    return between


@pytest.mark.parametrize(
    "between",
    [
        rebound,
        attribute,
        two_at_once,
        part_of_more,
        read_before_and_after,
        taught(averaged_data),
        taught(averaged_in_place),
    ],
    ids=lambda each: each.__name__,
)
def test_tensors_that_a_forward_replaces(
    between: Callable[[Net, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, captures = trained(between, monkeypatch=monkeypatch)
    assert captures == [0] * 8


def test_a_tensor_that_was_read_stays_as_it_was() -> None:
    step, _ = trained(rebound, steps=2)
    before = step.module.center
    contents = before.clone()
    step(torch.randn(8, 16), torch.randint(0, 5, (8,)))
    assert step.module.center is not before
    assert torch.equal(before, contents)


def test_a_teacher_updated_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(net: Net, index: int) -> None:
        averaged_in_place(net, 0.9 + index / 100)

    _, captures = trained(taught(lambda _net: None), change=change, monkeypatch=monkeypatch)
    assert captures == [0] * 8


@pytest.mark.parametrize("trains", [False, True])
def test_a_loss_that_keeps_a_tensor_and_a_number(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, captures = trained(lambda _net, h: h, Centered(trained=trains), monkeypatch=monkeypatch)
    assert sum(captures) <= 2  # once for a root that is 2, a number of which torch knows something


def test_numbers_of_a_model_beside_a_loss_with_parameters() -> None:
    trained(
        lambda net, h: h * net.heat, Centered(trained=True), lambda net, index: setattr(net, "heat", 0.5 + index / 10)
    )


def test_a_tensor_kept_elsewhere_too_is_refused() -> None:
    history = [torch.zeros(32)]

    def between(net: Net, h: Tensor) -> Tensor:
        net.mean = 0.8 * net.mean + h.detach().mean(0)
        history[0] = net.mean
        return h * net.mean

    net = Net(between)
    net.history = history
    with pytest.raises(CaptureError, match="from one step to the next"):
        magis.optimize(
            net,
            (torch.randn(8, 16), torch.randint(0, 5, (8,))),
            functional.cross_entropy,
            torch.optim.SGD(net.parameters(), lr=0.1),
            latency_ratio=1.5,
            budget=40,
        )


def test_data_of_trained_parameters_is_refused() -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        net.two.weight.data = net.two.weight.data * 0.99
        return h

    with pytest.raises(CaptureError, match=r"replaces parameter 'two\.weight'"):
        trained(between)


def mixed(draw: Callable[[], float]) -> Callable[[Net, Tensor], Tensor]:
    def between(_net: Net, h: Tensor) -> Tensor:
        share = draw()
        return share * h + (1 - share) * h[torch.randperm(len(h))]

    return between


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.beta(0.4, 0.4),  # noqa: NPY002
        lambda: np.random.uniform(0.2, 0.8),  # noqa: NPY002
        lambda: random.betavariate(0.4, 0.4),
        lambda: 0.5 + random.random() * random.random(),
        lambda: math.exp(-uniform(0.1, 2.0)),
        lambda: random.gauss(0.5, 0.01) + np.random.exponential(),  # noqa: NPY002
    ],
)
def test_numbers_that_are_drawn_on_the_host(draw: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> None:
    step, captures = trained(mixed(draw), monkeypatch=monkeypatch)
    assert sum(captures) <= 1  # numbers below zero are others
    assert step.report().update == "part of the step"


def test_decisions_by_drawn_numbers_have_a_plan_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> float:
        share = np.random.beta(0.4, 0.4)  # noqa: NPY002
        return max(share, 1 - share)

    step, captures = trained(mixed(draw), monkeypatch=monkeypatch)
    assert sum(captures) <= 1
    assert len(step._entries) <= 2


def test_what_is_drawn_besides_numbers_is_captured_at_each_step() -> None:
    trained(lambda _net, h: h * torch.tensor(np.random.rand(32), dtype=torch.float32))  # noqa: NPY002


def counted(net: Net, h: Tensor) -> Tensor:
    net.count += 1
    return h * min(1.0, net.count / 8.3)


def cooled(net: Net, h: Tensor) -> Tensor:
    net.heat = max(0.5, net.heat * 0.97)
    return h / net.heat


def annealed(net: Net, h: Tensor) -> Tensor:
    heat = 0.1 + 0.9 * math.exp(-net.count / 10)
    net.count = net.count + 2
    return h / heat


def in_turn(net: Net, h: Tensor) -> Tensor:
    net.count += 1
    return h * 0.5 if net.count % 2 else h


@pytest.mark.parametrize(("between", "most"), [(counted, 2), (cooled, 0), (annealed, 0), (in_turn, 1)])
def test_numbers_that_a_forward_reads_and_changes(
    between: Callable[[Net, Tensor], Tensor], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, captures = trained(between, monkeypatch=monkeypatch)
    assert sum(captures) <= most


def test_a_number_that_sizes_something_and_changes_is_refused() -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        net.count += 1
        return h + torch.zeros(net.count, 32).mean(0)

    with pytest.raises(CaptureError, match=r"changes model\.count"):
        trained(between)


def test_an_error_takes_back_what_was_drawn_and_counted() -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        net.heat = net.heat * 0.9
        return h * random.random() * net.heat

    step, _ = trained(between)
    seeded(3)
    heat = step.module.heat
    with pytest.raises(IndexError):
        step(torch.randn(8, 16), torch.full((8,), 7))
    found = random.getstate()
    seeded(3)
    random.random()
    assert found == random.getstate()  # as eager leaves it: drawn once
    assert step.module.heat == heat * 0.9


@pytest.mark.parametrize(
    "read",
    [lambda: OTHER.param_groups[0]["lr"], lambda: SCHEDULE.get_last_lr()[0], lambda: 0.9**SCHEDULE.last_epoch],
)
def test_rates_of_others(read: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> None:
    class Once:
        def __init__(self) -> None:
            self.last = -1

        def __call__(self, _net: Net, index: int) -> None:
            if index != self.last:
                self.last = index
                OTHER.step()
                SCHEDULE.step()

    _, captures = trained(lambda _net, h: h * read(), change=Once(), monkeypatch=monkeypatch)
    assert captures[2:] == [0] * 6


def test_a_branch_on_a_state_that_the_first_step_alone_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, captures = trained(lambda net, h: net.quantize(torch.relu(h)), monkeypatch=monkeypatch)
    assert sum(captures) == 1
    assert captures[4:] == [0] * 4


def test_a_slice_of_another_length_is_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        net.count += 1
        return h + h[:, net.count : net.count + 30].mean()

    trained(between, monkeypatch=monkeypatch)
