"""Forwards that draw on the host, as layer drop and SpecAugment do: eager's numbers, state and generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from magis.ops.generators import seed_all
from tests.training.loops import Loops, assert_same, batch, net


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(net(depth=1, dropout=0.1) for _ in range(2))
        self.head = net(depth=2)


class ByTorch(Layers):
    """Leaves layers out, as encoders of speech do."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not (self.training and torch.rand([]) < 0.4):
                x = layer(x)
        return self.head(x)


class ByPython(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() > 0.4:
                x = layer(x)
        return self.head(x)


class ByNumpy(Layers):
    """Masks what numpy draws, and draws with torch behind that."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor(np.random.rand(x.shape[0]) < 0.3)  # noqa: NPY002  (as libraries do it)
        x = torch.where(mask[:, None], 0.5, x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def states() -> tuple[object, ...]:
    return torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("make", [partial(AdamW, lr=1e-2), partial(SGD, lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("kind", [ByTorch, ByPython, ByNumpy])
def test_every_step_draws_what_eager_draws(kind: Callable[[], nn.Module], make: Any) -> None:
    seed_all(3)
    before = states()
    loops = Loops(kind(), make, budget=30)
    assert_same(states()[1:], before[1:])
    found = []
    for step in (loops.step, loops.eager):
        seed_all(5)
        found.append([(step(*batch(seed=seed)), *states()) for seed in range(3)])
    assert_same(*found)
    loops.same()


def test_plans_are_kept_by_what_is_drawn() -> None:
    loops = Loops(ByNumpy(), partial(SGD, lr=0.1), budget=30)
    for seed in range(3):
        loops.step(*batch(seed=seed))
    (entry,) = loops.step._entries
    assert len(entry.variants) == 1
