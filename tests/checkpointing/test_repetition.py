"""Policies for blocks that would compute something else when they run again, and for steps under autocast."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis import CaptureError, UsageError, checkpoint_policy
from magis.extensions.compile import RegionPolicies
from magis.ops.generators import generators_kept, seed_all
from magis.runtime.measure import window_peak
from tests.checkpointing.test_policy import Block, Net, made, step

GENERATOR, CALLS, STORE = torch.Generator(), [0], torch.zeros(4)
OWN = [np.random.default_rng(3)]


def _counts(block: Any, h: Tensor) -> Tensor:
    block.calls += 1
    return h / block.calls


def _grows(block: Any, h: Tensor) -> Tensor:
    block.seen.append(1)
    return h * len(block.seen)


def _counts_outside(_block: Any, h: Tensor) -> Tensor:
    CALLS[0] += 1
    return h / CALLS[0]


def _seeds(_block: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return h * torch.rand(h.shape)


def _writes(write: Callable[[Any], object]) -> Callable[[Any, Tensor], Tensor]:
    def besides(block: Any, h: Tensor) -> Tensor:
        write(block)
        return h

    return besides


REPEATS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda _block, h: F.dropout(h, 0.3),
    "seeds": _seeds,
    "writes its buffer": _writes(lambda block: block.count.add_(1)),
    "writes its buffer by a view": _writes(lambda block: block.count[None].add_(1)),
}
CHANGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a counter": _counts,
    "a list": _grows,
    "a counter outside": _counts_outside,
    "an own generator": lambda block, h: h * torch.rand(h.shape, generator=block.generator),
    "a generator outside": lambda _block, h: h * torch.rand(h.shape, generator=GENERATOR),
    "random": lambda _block, h: h * random.random(),
    "a branch on random": lambda _block, h: h.sin() if random.random() < 0.5 else h * 2,
    "numpy": lambda _block, h: h * float(np.random.rand()),  # noqa: NPY002 (what models do)
    "a permutation of numpy": lambda _block, h: h[:, torch.from_numpy(np.random.permutation(32))],  # noqa: NPY002
    "an own generator of numpy": lambda block, h: h * float(block.numbers.random()),
    "a generator of numpy outside": lambda _block, h: h * float(OWN[0].random()),
    "writes a plain tensor": _writes(lambda block: block.plain.add_(1)),
    "writes a tensor outside by a view": _writes(lambda _block: STORE[1:3].add_(1)),
    "writes its buffer in a list": _writes(lambda block: torch._foreach_add_([block.count], 1)),
    "layer drop": lambda _block, h: h if torch.rand(()).item() < 0.5 else h.sin(),
}


class Odd(Block):
    """A block that does something besides."""

    def __init__(self, besides: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(32)
        self.besides, self.calls, self.seen = besides, 0, list[int]()
        self.generator, self.numbers = torch.Generator(), np.random.default_rng(1)
        self.plain = torch.zeros(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.besides(self, x))


@pytest.mark.parametrize("name", [*REPEATS, *CHANGES])
def test_blocks_that_would_not_repeat_themselves_stay_as_they_are_or_are_refused(name: str) -> None:
    def odd() -> tuple[Net, tuple[Tensor, Tensor]]:
        net, batch = made()
        net.layers[1] = Odd((REPEATS | CHANGES)[name])
        return net, batch

    def gradients(policy: RegionPolicies | None) -> list[Tensor]:
        net, batch = odd()
        seed_all(1)
        GENERATOR.manual_seed(1)
        CALLS[0], OWN[0] = 0, np.random.default_rng(3)
        STORE.zero_()
        with nullcontext() if policy is None else policy.applied(net):
            return [*step(net, batch), STORE.clone(), net.layers[1].plain.clone()]

    net, batch = odd()
    try:
        policy = checkpoint_policy(net, batch, F.mse_loss, memory_ratio=0.9)
    except CaptureError:
        policy = None
    else:
        assert policy.regions
        assert ("layers.1 stays as it is: " in str(policy)) == (name in CHANGES)
    assert policy is not None or name in CHANGES
    with generators_kept():
        expected = gradients(None)
        assert all(torch.equal(one, other) for one, other in zip(gradients(policy), expected, strict=True))


class Shared(Net):
    """Blocks whose first weight is one, which is used ahead of them, too."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up = nn.Linear(32, 32)
            layer.down = nn.Linear(32, 32)
            layer.up.weight = self.first.weight


@pytest.mark.parametrize("planned_for", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", [Net, Shared])
def test_under_autocast_numbers_are_eagers_and_bytes_those_of_its_type(
    kind: type[Net], planned_for: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    net, batch = kind(), (torch.randn(512, 32), torch.randn(512, 8))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out.float(), target)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(net(batch[0]), batch[1])
        found.backward()

    def gradients() -> list[Tensor]:
        net.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        run()
        found = [each.grad for each in net.parameters() if each.grad is not None]
        net.zero_grad(set_to_none=True)
        return found

    policy = checkpoint_policy(net, batch, loss, memory_ratio=0.8, autocast=planned_for)
    assert any(region.saved for region in policy.regions)
    expected = gradients()
    with policy.applied(net):
        assert all(torch.equal(one, other) for one, other in zip(gradients(), expected, strict=True))
        held = sum(each.nbytes for each in (*net.parameters(), *batch))
        measured = held + window_peak(run).peak_bytes
    assert planned_for is None or abs(measured - policy.planned_bytes) <= 2048
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match="pass autocast="):
        checkpoint_policy(net, batch, loss, memory_ratio=0.8)
