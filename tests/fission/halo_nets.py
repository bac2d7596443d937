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


def super_resolution(channels: int, times: int = 2) -> nn.Module:
    """A picture to one that is so many times as large."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 5, padding=2), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels, 3 * times**2, 3, padding=1), nn.PixelShuffle(times),
    )  # fmt: skip


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
    "super-resolution": lambda: net(super_resolution(6, times=4), 8, 12),
    "pooled": lambda: net(pooled(4), 8, 12),
}


def large_convnext() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], object]:
    """One picture of 512 x 512 through a block of 64 channels."""
    return convnext(64, 1), (torch.randn(1, 3, 512, 512),), (), squared


def large_super_resolution() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], object]:
    """A picture of 512 x 512 to one of 2048 x 2048."""
    return super_resolution(16, times=4), (torch.randn(1, 3, 512, 512),), (), squared


def small_super_resolution() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], object]:
    """A picture of 32 x 32 to one of 128 x 128."""
    return super_resolution(16, times=4), (torch.randn(1, 3, 32, 32),), (), squared
