"""Convolution networks without batch norm at batch 1: only places can be cut, and windows overlap."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.nets import OPTIMIZERS, Net, rows


class ConvNeXtBlock(nn.Module):
    """Depthwise 7 x 7, layer norm over channels, two linear layers with four times the channels between; residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.narrow(nn.functional.gelu(self.wide(h))) * self.scale
        return x + h.permute(0, 3, 1, 2)


def convnext(channels: int, blocks: int) -> nn.Module:
    """Two by two patches, blocks, and a map of the same size."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 2, stride=2),
        *(ConvNeXtBlock(channels) for _ in range(blocks)),
        nn.Conv2d(channels, 3, 1),
    )


def super_resolution(channels: int, layers: int = 1) -> nn.Module:
    """A small picture to one of twice the size."""
    inner = [part for _ in range(layers) for part in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
    return nn.Sequential(
        nn.Conv2d(3, channels, 5, padding=2),
        nn.ReLU(),
        *inner,
        nn.Conv2d(channels, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )


def pooled(channels: int) -> nn.Module:
    """A convolution with stride and dilation between poolings whose windows overlap, and a transposed one."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.AvgPool2d(3, 1, 1), nn.Conv2d(channels, channels, 5, 2, 4, 2),
        nn.SiLU(), nn.AvgPool2d(3, 1, 1, divisor_override=5), nn.ConvTranspose2d(channels, 3, 3, 2, 1, 1, bias=False),
    )  # fmt: skip


def squared(output: Tensor) -> Tensor:
    return output.pow(2).sum()


def net(module: nn.Module, height: int, width: int) -> Net:
    """One picture, the sum of squares, and gradients alone."""
    return Net(lambda: module, rows(1, 3, height, width), loss_fn=squared, rule=OPTIMIZERS["gradients"])


NETS = {
    "convnext": lambda: net(convnext(4, 2), 16, 24),
    "super-resolution": lambda: net(super_resolution(6), 8, 12),
    "pooled": lambda: net(pooled(4), 8, 12),
}
