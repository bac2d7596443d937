"""Factories for cases of their own: small networks that still have something to recompute."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis.capture.contents import is_hollow
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


def blocks(count: int = 6) -> Workload:
    """Blocks, 64 wide, batch 256, AdamW."""
    body = nn.Sequential(nn.Linear(32, 64), *(Block(64) for _ in range(count)), nn.Linear(64, 10))
    return Workload(
        "blocks",
        body.train(),
        (torch.randn(256, 32),),
        (torch.randint(10, (256,)),),
        F.cross_entropy,
        OptimizerSpec("adamw", weight_decay=0.01),
        blocks=tuple(str(index + 1) for index in range(count)),
    )


def few_blocks() -> Workload:
    """Four of them."""
    return blocks(4)


class Hungry(nn.Sequential):
    """Runs out of memory in eager mode; a captured step of it does not."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_hollow(x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        result: Tensor = super().forward(x)
        return result


def hungry() -> Workload:
    """The same in a module that only runs captured."""
    work = few_blocks()
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
    """Three blocks of three projections each, 32 wide, batch 512: calls that are merged into one."""
    body = nn.Sequential(nn.Linear(16, 32), *(Projected(32) for _ in range(3)), nn.Linear(32, 10))
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


# Networks whose casts differ: norms of half-precision inputs, weights that are cast once and used twice.


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        out: Tensor = self.last(self.out(F.gelu(mixed)))
        return out


def transformer() -> Workload:
    module = nn.Sequential(*(Layer(32) for _ in range(4)), nn.Flatten(0, 1), nn.Linear(32, 10)).train()
    x, y = torch.randn(16, 12, 32), torch.randint(10, (16 * 12,))
    spec, blocks = OptimizerSpec("adam", lr=1e-3), ("0", "1", "2", "3")
    return Workload("transformer", module, (x,), (y,), F.cross_entropy, spec, blocks)


def convolutions() -> Workload:
    parts: list[nn.Module] = []
    for width in (3, 16, 16, 16):
        parts += [nn.Conv2d(width, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.GroupNorm(4, 16)]
    module = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).train()
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    return Workload("convolutions", module, (x,), (y,), F.cross_entropy, OptimizerSpec("sgd", lr=0.1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.mix = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        out = self.words(x)
        for _ in range(4):
            out = out + torch.tanh(self.mix(out)) * torch.softmax(out, -1).pow(2)
        return F.linear(out, self.words.weight)


def tied() -> Workload:
    x, y = torch.randint(50, (32, 16)), torch.randint(50, (32, 16))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return Workload("tied", Tied().train(), (x,), (y,), loss, OptimizerSpec("momentum", lr=0.1))
