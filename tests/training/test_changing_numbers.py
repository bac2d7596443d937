"""Numbers of the user's own that change at every step become inputs of the graph: one plan, with eager's bits."""

from __future__ import annotations

import copy
import math
import sys
import types
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import magis
from magis.frontends import planned
from tests.training.loops import Loops

CONFIG = types.ModuleType("config_of_changing_numbers")
sys.modules[CONFIG.__name__] = CONFIG
GLOBAL = {"scale": 0.9}
LIMITS: dict[str, Any] = {"latency_ratio": 1.5, "memory_ratio": None, "budget": 40}


class Config:
    scale: ClassVar[float] = 0.9


class Slots:
    __slots__ = ("scale",)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round and scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.factor * gradient, None


class Net(nn.Module):
    """Two layers with something between them that takes numbers."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.between = nn.Linear(16, 32), nn.Linear(32, 5), between
        self.scale, self.count = 0.9, 7
        self.weights, self.listed = {"kl": 0.9}, [5.0, 0.9]
        self.config, self.slots = types.SimpleNamespace(inner=types.SimpleNamespace(scale=0.9)), Slots()
        self.dropout, self.norm = nn.Dropout(0.3), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.between(self, torch.tanh(self.one(x))))


def scaled(net: Net, number: float) -> None:
    net.scale = number


def counted(net: Net, number: float) -> None:
    net.count = round(1000 * number)


def trained(
    between: Callable[[Net, Tensor], Tensor],
    change: Callable[[Net, float], Any] = scaled,
    *,
    numbers: list[float] | None = None,
    loss_of: Callable[[Net], Any] = lambda _net: functional.cross_entropy,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[magis.OptimizedStep, list[int]]:
    """Train with a number that changes at every step beside eager: the step, and the captures of each call."""
    captures: list[int] = []
    seen = planned.captured_step

    def captured(*args: Any, **keywords: Any) -> Any:
        captures[-1] += 1
        return seen(*args, **keywords)

    ours = Net(between)
    change(ours, 0.9)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs)]
    x, y = torch.randn(8, 16), torch.randint(0, 5, (8,))
    step = magis.optimize(ours, (x, y), loss_of(ours), optimizers[0], latency_ratio=1.5, budget=40)
    monkeypatch.setattr(planned, "captured_step", captured)
    for index, number in enumerate(numbers or [0.9 * 0.97**power for power in range(6)]):
        captures.append(0)
        for net in (ours, theirs):
            change(net, number)
        torch.manual_seed(index)
        loss = step(x, y)
        torch.manual_seed(index)
        optimizers[1].zero_grad()
        eager = loss_of(theirs)(theirs(x), y)
        eager.backward()
        optimizers[1].step()
        assert torch.equal(loss, eager.detach()), f"step {index}"
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), f"step {index}"
    return step, captures


@pytest.mark.parametrize(
    ("between", "change"),
    [
        (lambda net, h: h * net.scale, scaled),
        (lambda net, h: h * net.weights["kl"], lambda net, x: net.weights.update(kl=x)),
        (lambda net, h: h * net.listed[1], lambda net, x: net.listed.__setitem__(1, x)),
        (lambda net, h: h * net.config.inner.scale, lambda net, x: setattr(net.config.inner, "scale", x)),
        (lambda net, h: h * net.slots.scale, lambda net, x: setattr(net.slots, "scale", x)),
        (lambda _net, h: h * Config.scale, lambda _net, x: setattr(Config, "scale", x)),
        (lambda _net, h: h * GLOBAL["scale"], lambda _net, x: GLOBAL.update(scale=x)),
        (lambda _net, h: h * CONFIG.scale, lambda _net, x: setattr(CONFIG, "scale", x)),
        (lambda net, h: net.dropout(h), lambda net, x: setattr(net.dropout, "p", x / 2)),
        (lambda net, h: net.norm(h), lambda net, x: setattr(net.norm, "eps", x / 1000)),
        (lambda net, h: h * min(1.0, net.count / 2000), counted),
        (lambda net, h: h * net.count, counted),
    ],
)
def test_wherever_they_are_kept(
    between: Callable[[Net, Tensor], Tensor], change: Callable[[Net, float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, captures = trained(between, change, monkeypatch=monkeypatch)
    assert captures == [0, 1, 0, 0, 0, 0]
    assert len(step._entries) == 2


@pytest.mark.parametrize(
    "between",
    [
        lambda net, h: net.scale / (h * h + 1),
        lambda net, h: h / net.scale,
        lambda net, h: net.scale - h,
        lambda net, h: (h.abs() + 1) ** net.scale,
        lambda net, h: torch.sub(h, h * h, alpha=net.scale),
        lambda net, h: functional.dropout(h, net.scale / 2),
        lambda net, h: functional.leaky_relu(h, net.scale),
        lambda net, h: functional.softplus(h, beta=net.scale),
        lambda net, h: h.clamp(-net.scale / 3, net.scale / 3),
        lambda net, h: torch.lerp(h, h * h, net.scale / 2),
        lambda net, h: torch.where(h > net.scale / 9, h, net.scale),
        lambda net, h: h.masked_fill(h > 0, 1 - net.scale),
        lambda net, h: h * torch.full((32,), net.scale),
        lambda net, h: h * torch.tensor([net.scale, 1 - net.scale]).repeat(16),
        lambda net, h: h * torch.tensor(net.scale, dtype=torch.bfloat16),
        lambda net, h: h * math.exp(-net.scale) + math.cos(math.pi * net.scale),
        lambda net, h: h * exp(-net.scale) if exp(-net.scale) > 0.2 else h,
        lambda net, h: h * max(0.1, net.scale) if net.scale > 0.2 else h,
        lambda net, h: h * (1 - (1 - net.scale)) + h * net.scale,
        lambda net, h: functional.scaled_dot_product_attention(h[None], h[None], h[None], scale=net.scale)[0],
        lambda net, h: Reverse.apply(h, net.scale),
        lambda net, h: h + torch.randn_like(h) * net.scale,
        lambda net, h: h.clone().mul_(net.scale).add_(net.scale),
    ],
)
def test_whatever_is_done_with_them(between: Callable[[Net, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step, captures = trained(between, monkeypatch=monkeypatch)
    assert captures == [0, 1, 0, 0, 0, 0]
    assert len(step._entries) == 2


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda net: lambda out, y: functional.cross_entropy(out, y, label_smoothing=net.scale / 3),
        lambda net: lambda out, y: functional.huber_loss(out.sum(1), y.float(), delta=net.scale),
        lambda net: lambda out, y: functional.cross_entropy(out, y) + net.scale * out.pow(2).mean(),
        lambda net: lambda out, y: net.scale**2 * functional.cross_entropy(out / net.scale, y),
    ],
)
def test_in_the_loss(loss_of: Callable[[Net], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, captures = trained(lambda _net, h: h, loss_of=loss_of, monkeypatch=monkeypatch)
    assert captures == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "between",
    [
        lambda net, h: h * float.__mul__(net.scale, 2.0),  # C code reads it: what comes out is a constant
        lambda net, h: h * torch.zeros(3).add(net.scale)[1].item(),
        lambda net, h: h if torch.full((), net.scale) > 0.85 else h * 2,
        lambda net, h: h * torch.tensor(10 * net.scale, dtype=torch.int64),
        lambda net, h: h * torch.arange(0, 32 * net.scale, net.scale)[:32],
        lambda net, h: h * complex(net.scale).real,
        lambda net, h: h * float(f"{net.scale:.3f}"),
        lambda net, h: sum((h * each for each in range(int(10 * net.scale))), h),
    ],
)
def test_what_is_read_unseen_stays_a_constant(
    between: Callable[[Net, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(between, monkeypatch=monkeypatch)


def test_decisions_by_numbers_are_looked_at_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        return h * net.scale if exp(net.scale) > math.e**0.6 else h * net.scale * net.scale

    numbers = [0.9, 0.89, 0.88, 0.59, 0.58, 0.85, 0.55]
    _, captures = trained(between, numbers=numbers, monkeypatch=monkeypatch)
    assert captures == [0, 1, 0, 1, 0, 0, 0]


def test_zero_and_one_are_no_numbers_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [0.0, 0.2, 0.4, 0.0, 0.3, 1.0, 1.0, -0.3, -0.7]
    step, _ = trained(
        lambda net, h: h + net.scale * functional.dropout(h, abs(net.scale)), numbers=numbers, monkeypatch=monkeypatch
    )
    assert sum(entry.plan.inputs is not None for entry in step._entries) == 2  # above zero and below


def test_a_number_that_sizes_something_is_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = trained(lambda net, h: h + torch.zeros(net.count % 7 + 1, 32).mean(0), counted, monkeypatch=monkeypatch)
    assert all(entry.plan.inputs is None for entry in step._entries)


def test_the_forward_leaves_no_stand_in_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = dict(vars(math))
    step, _ = trained(lambda net, h: h * math.exp(net.scale), monkeypatch=monkeypatch)
    assert type(step.module.scale) is float
    assert dict(vars(math)) == functions


def test_a_plan_with_inputs_is_saved_with_the_present_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = trained(lambda net, h: h * net.scale, monkeypatch=monkeypatch)
    step.save(tmp_path / "plan.txt")
    net = Net(step.module.between)
    net.scale = step.module.scale
    batch = torch.randn(8, 16), torch.randint(0, 5, (8,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    again = magis.optimize(
        net, batch, functional.cross_entropy, optimizer, latency_ratio=1.5, plan=tmp_path / "plan.txt"
    )
    assert again.report().fission == "as saved"


def test_steps_of_other_sizes_take_decisions_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from magis.planner import planning

    searches: list[int] = []
    search = planning._search_all
    monkeypatch.setattr(planning, "_search_all", lambda *args, **names: searches.append(1) or search(*args, **names))
    loops = Loops(
        nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.Tanh()))), None, memory_ratio=0.9
    )
    before = len(searches)
    for rows in (48, 96, 33, 64, 40):
        loops.agree(1, rows=rows)
        report = loops.step.report()
        assert report.planned_bytes <= 0.9 * report.original_bytes
    assert len(searches) - before <= 2  # fewer rows weigh less beside the weights: the limit may need another plan


def test_batches_of_several_sizes_in_turn_are_captured_once_each_and_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    loops = Loops(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), torch.optim.AdamW, memory_ratio=0.95)
    seen: list[int] = []
    capture = planned.captured_step
    monkeypatch.setattr(planned, "captured_step", lambda *args, **names: seen.append(1) or capture(*args, **names))
    for _ in range(3):
        for rows in (16, 24, 32, 40, 48, 56):
            loops.agree(1, rows=rows)
    assert len(seen) == 6
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    loss = loops.step(x, y)
    held = [weakref.ref(tensor.untyped_storage()) for tensor in (x, y, loss)]
    del x, y, loss
    gc.collect()
    assert [each() for each in held] == [None] * 3
