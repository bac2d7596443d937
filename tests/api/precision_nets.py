"""Small networks whose casts differ: norms of half-precision inputs, weights that are cast once and used twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.models import OptimizerSpec, Workload


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
