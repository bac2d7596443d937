"""Operators of the user's own: those that return nothing, as they check something, and those registered again."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from magis import optimize
from tests.training.loops import Loops

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


def bend(scale: float, copies: int) -> Callable[[Tensor], Tensor]:
    """Register an operator, again if it is there: torch then frees the one before, as when a notebook's cell runs."""

    @torch.library.custom_op("magis_tests::bend", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        return (x * scale).repeat(1, copies)

    operator.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[1] * copies))
    operator.register_autograd(lambda _, grad: grad.reshape(grad.shape[0], copies, -1).sum(1) * scale)
    return operator


class Bent(nn.Module):
    def __init__(self, operator: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.layers, self.operator = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), operator

    def __deepcopy__(self, memo: dict[int, Any]) -> Bent:
        twin = Bent(self.operator)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (self.operator or torch.ops.magis_tests.bend)(torch.tanh(layer(x)))[:, -32:]
        return x


@pytest.mark.parametrize("by_name", [False, True])
def test_an_operator_that_is_registered_again_is_the_new_one(*, by_name: bool) -> None:
    """Of other contents and of other shapes; in new steps, and in one that was planned with the operator before."""
    before: Loops | None = None
    for scale, copies in ((1.0, 1), (2.0, 1), (0.5, 2), (0.5, 1)):
        operator = bend(scale, copies)
        gc.collect()
        if before is not None and by_name:
            before.agree(2)
        before = Loops(Bent(None if by_name else operator), partial(SGD, lr=0.1))
        before.agree(2)
