"""Operators that return nothing, as they check something or tell somebody, run as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from magis import optimize

TOLD: list[float] = []


@torch.library.custom_op("results::tell", mutates_args=())
def tell(x: Tensor, share: float = 1.0) -> None:
    if x.isnan().any():
        raise ValueError("no number")
    TOLD.append(share * float(x.detach().sum()))


@torch.library.custom_op("results::count", mutates_args=())
def count(x: Tensor) -> int:
    TOLD.append(float(x.numel()))
    return 0


count.register_fake(lambda x: 0)
tell.register_fake(lambda x, share=1.0: None)


class Telling(nn.Module):
    def __init__(self, between: Callable[[Telling, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(16, 16), nn.Linear(16, 5), between
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.level = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self, torch.tanh(self.first(x)))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def in_order(net: Telling, x: Tensor) -> Tensor:
    tell(x[:2], 0.5)
    x = x * net.level
    tell(x)
    count(x)
    return x


def before_a_write(net: Telling, x: Tensor) -> Tensor:
    x = x * net.level
    tell(x)
    return x.mul_(3.0)


def in_the_backward(net: Telling, x: Tensor) -> Tensor:
    x = x * net.level
    x.register_hook(tell)
    return x


def computed_again(net: Telling, x: Tensor) -> Tensor:
    return checkpoint(in_order, net, x, use_reentrant=False)


def asserted(net: Telling, x: Tensor) -> Tensor:
    torch._assert_async((x.detach() * net.level).isfinite().all(), "not finite")
    return x


CHECKS: dict[str, Callable[[Telling, Tensor], Tensor]] = {
    "in order": in_order,
    "before a write": before_a_write,
    "in the backward": in_the_backward,
    "computed again": computed_again,
    "asserted": asserted,
    "factors": lambda net, x: x * torch.linalg.inv(torch.eye(16) * net.level.nan_to_num(0.0)).sum(),
}


@pytest.mark.parametrize("name", CHECKS)
def test_operators_without_results_run_as_in_eager_mode(name: str) -> None:
    torch.manual_seed(0)
    net, told, data = Telling(CHECKS[name]), [], torch.randn(32, 16)
    labels = torch.randint(0, 5, (32,))
    for planned in (False, True):
        module = copy.deepcopy(net)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        step = None
        if planned:
            rows = (data, labels), nn.functional.cross_entropy, optimizer
            step = optimize(module, *rows, memory_ratio=0.95, budget=60)
        seen: list[Any] = []
        for level in (1.0, 2.0, float("nan"), 1.0):
            module.level.fill_(level)
            TOLD.clear()
            try:
                if step is not None:
                    seen.append(step(data, labels))
                else:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(module(data), labels)
                    loss.backward()
                    optimizer.step()
                    seen.append(loss.detach())
            except (RuntimeError, ValueError) as error:
                seen.append(str(error))
                TOLD.clear()  # the step went once more, by eager
            seen += [repr(TOLD), *(each.detach().clone() for each in module.parameters())]
        told.append(seen)
    assert any("no number" in each or "not" in each or "singular" in each for each in told[0] if isinstance(each, str))
    for ours, theirs in zip(*told, strict=True):
        assert (ours == theirs) if isinstance(ours, str) else torch.equal(ours, theirs), (ours, theirs)
