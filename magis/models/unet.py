"""U-Net (Ronneberger et al. 2015), padded and with BatchNorm, as commonly re-implemented."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from magis.models.batches import images, init_convolutions, labels, pixel_loss, seeded
from magis.models.sizes import check_divides, check_sizes
from magis.models.style import Style
from magis.models.workload import Workload

__all__ = ["DoubleConv", "UNet", "UNetConfig", "unet"]


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of one U-Net and its batch; the defaults are those of the paper's Table 2."""

    batch_size: int = 32
    image_size: int = 256
    width: int = 64
    """Channels at full resolution; they double at each of the levels below."""
    levels: int = 4
    classes: int = 2

    def __post_init__(self) -> None:
        check_sizes("unet", self)
        check_divides("unet", "image_size", self.image_size, "2 ** levels", 2**self.levels)


class DoubleConv(nn.Module):
    """Twice 3x3 convolution, BatchNorm, ReLU: [batch, inputs, h, w] -> [batch, outputs, h, w]."""

    def __init__(self, style: Style, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            style.conv(inputs, outputs, 3, bias=bias),
            style.batch_norm(outputs),
            style.relu(),
            style.conv(outputs, outputs, 3, bias=bias),
            style.batch_norm(outputs),
            style.relu(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Down(nn.Module):
    """Halve the resolution, double the channels."""

    def __init__(self, style: Style, inputs: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.convs = DoubleConv(style, inputs, 2 * inputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.convs(self.pool(x))
        return out


class Up(nn.Module):
    """Double the resolution of [batch, c, h, w], join [batch, c/2, 2h, 2w] of the encoder, halve c."""

    def __init__(self, style: Style, inputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2, bias=style.bias())
        self.convs = DoubleConv(style, inputs, inputs // 2)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        out: Tensor = self.convs(torch.cat([skipped, self.up(x)], dim=1))
        return out


class UNet(nn.Module):
    """Images [batch, 3, size, size] -> pixel logits [batch, classes, size, size]."""

    def __init__(self, config: UNetConfig, style: Style) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.levels + 1)]
        self.first = DoubleConv(style, 3, config.width)
        self.downs = nn.ModuleList(Down(style, width) for width in widths[:-1])
        self.ups = nn.ModuleList(Up(style, width) for width in reversed(widths[1:]))
        self.head = style.conv(config.width, config.classes, 1, bias=True)
        init_convolutions(self, mode="fan_in")

    def forward(self, x: Tensor) -> Tensor:
        skipped = [self.first(x)]
        for down in self.downs:
            skipped.append(down(skipped[-1]))
        x = skipped.pop()
        for up in self.ups:
            x = up(x, skipped.pop())
        out: Tensor = self.head(x)
        return out


def unet(config: UNetConfig, style: Style, name: str, seed: int) -> Workload:
    """U-Net with a batch of noise images and random pixel classes, cross-entropy per pixel."""
    with seeded(seed):
        module = UNet(config, style)
        inputs = (images(config.batch_size, config.image_size),)
        targets = (labels(config.classes, config.batch_size, config.image_size, config.image_size),)
    levels = range(config.levels)
    return Workload(
        name=name,
        module=module,
        inputs=inputs,
        targets=targets,
        loss_fn=pixel_loss,
        optimizer=style.optimizer,
        blocks=("first", *(f"downs.{i}" for i in levels), *(f"ups.{i}" for i in levels)),
        explicit_attention=style.explicit_attention,
    )
