"""Two training loops side by side: a user's own in eager mode, and one with an optimized step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from magis import optimize
from magis.frontends.optimize import OptimizedStep

BUDGET = 150
"""Plans per search: enough for small networks, and quick."""


def net(width: int = 32, depth: int = 4, *, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """A chain that has something to recompute."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(width, width), nn.Tanh()]
        parts += [nn.Dropout(dropout)] if dropout else []
        parts += [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(*parts)


def batch(rows: int = 64, width: int = 32, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


loss_of = nn.functional.l1_loss


class Loops:
    """The same module twice, each with an optimizer of its own; `step` trains the first, `eager` the second."""

    def __init__(
        self,
        module: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer],
        loss_fn: Any = loss_of,
        example: Any = None,
        **limits: Any,
    ) -> None:
        self.module, self.twin = module, copy.deepcopy(module)
        self.optimizer, self.other = make(self.module.parameters()), make(self.twin.parameters())
        self.loss_fn = loss_fn
        settings = {"memory_ratio": 0.95, "budget": BUDGET, **limits}
        example = batch() if example is None else example
        self.step: OptimizedStep = optimize(self.module, loss_fn, self.optimizer, example, **settings)
        assert not self.step.report().fission  # parts sum in another order: not bit by bit

    def eager(self, inputs: Any, targets: Any) -> Tensor:
        self.other.zero_grad(set_to_none=True)
        inputs, targets = (each if isinstance(each, tuple) else (each,) for each in (inputs, targets))
        loss: Tensor = self.loss_fn(self.twin(*inputs), *targets)
        loss.backward()
        self.other.step()
        return loss.detach()

    def agree(self, steps: int = 3, **how: Any) -> None:
        """Both loops go so many steps, with the same random numbers; everything must be the same, bit for bit."""
        for seed in range(steps):
            data = batch(seed=seed, **how)
            torch.manual_seed(seed)
            ours = self.step(*data)
            torch.manual_seed(seed)
            assert torch.equal(ours, self.eager(*data))
        self.same()

    def same(self) -> None:
        assert_same(self.module.state_dict(), self.twin.state_dict())
        assert_same(self.optimizer.state_dict(), self.other.state_dict())


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal in structure and in every bit."""
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    else:
        assert ours == theirs
