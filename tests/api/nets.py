"""Factories for cases of their own: small networks that still have something to recompute."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis.capture.hollow import is_hollow
from magis.capture.workload import Workload
from magis.ops.optimizers import OptimizerSpec


class Block(nn.Module):
    """Residual block with norm, GELU and dropout: every kind of storage that a plan decides on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden))


def blocks() -> Workload:
    """Six blocks, 64 wide, batch 256, AdamW."""
    body = nn.Sequential(nn.Linear(32, 64), *(Block(64) for _ in range(6)), nn.Linear(64, 10))
    names = tuple(str(index) for index in range(1, 7))
    return Workload(
        "blocks",
        body.train(),
        (torch.randn(256, 32),),
        (torch.randint(10, (256,)),),
        F.cross_entropy,
        OptimizerSpec("adamw", weight_decay=0.01),
        blocks=names,
    )


class Hungry(nn.Sequential):
    """Runs out of memory in eager mode; a captured step of it does not."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_hollow(x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        result: Tensor = super().forward(x)
        return result


def hungry() -> Workload:
    """The same in a module that only runs captured."""
    work = blocks()
    return replace(work, module=Hungry(*work.module.children()).train())


class Projected(nn.Module):
    """A residual block of three projections of one tensor, as in attention, without what mixes positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        mixed = F.gelu(self.query(normed)) * torch.sigmoid(self.key(normed)) + self.value(normed)
        return x + self.out(mixed)


def projected() -> Workload:
    """Four blocks of three projections each, 32 wide, batch 512: calls that are merged into one."""
    body = nn.Sequential(nn.Linear(16, 32), *(Projected(32) for _ in range(4)), nn.Linear(32, 10))
    return Workload(
        "projected",
        body.train(),
        (torch.randn(512, 16),),
        (torch.randint(10, (512,)),),
        F.cross_entropy,
        OptimizerSpec("adamw", weight_decay=0.01),
    )


def no_blocks() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], object]:
    """A perceptron that names no blocks."""
    body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    return body, (torch.randn(64, 8),), (torch.randn(64, 1),), F.mse_loss


def branches() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], object]:
    """A module whose forward looks at its data."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * x.sum().item()

    return Branch(), (torch.randn(2, 4),), (torch.randn(2, 4),), F.mse_loss


def normed() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], object]:
    """A perceptron with norms over the batch."""
    norms = (nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU())
    body = nn.Sequential(*norms, nn.Linear(64, 3))
    return body.train(), (torch.randn(64, 8),), (torch.randint(3, (64,)),), F.cross_entropy
