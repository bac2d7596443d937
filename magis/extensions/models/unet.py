"""U-Net (Ronneberger et al. 2015) with padding and BatchNorm, and U-Net++ (Zhou et al. 2018)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture.workload import Workload
from magis.extensions.models.building import (
    Batch,
    Style,
    check_divides,
    check_sizes,
    images,
    init_convolutions,
    labels,
    numbered,
    pixel_loss,
    training_step,
)


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of a U-Net and its batch; defaults: the paper's Table 2."""

    batch_size: int = 32
    image_size: int = 256
    width: int = 64
    """Channels at full resolution; each level below doubles them."""
    levels: int = 4
    classes: int = 2

    def __post_init__(self) -> None:
        check_sizes("unet", self)
        check_divides("unet", "image_size", self.image_size, "2 ** levels", 2**self.levels)


class DoubleConv(nn.Module):
    """Two times 3x3 convolution, BatchNorm, ReLU: [batch, inputs, h, w] -> [batch, outputs, h, w]."""

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


def down(style: Style, inputs: int, outputs: int, *, bias: bool = False) -> nn.Sequential:
    """Return a layer that halves the resolution: [batch, inputs, h, w] -> [batch, outputs, h/2, w/2]."""
    convs = DoubleConv(style, inputs, outputs, bias=bias)
    return nn.Sequential(OrderedDict[str, nn.Module](pool=nn.MaxPool2d(2), convs=convs))


class Up(nn.Module):
    """Decoder layer: upsamples [batch, c, h, w], concatenates the encoder's [batch, c/2, 2h, 2w], and halves c."""

    def __init__(self, style: Style, inputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2, bias=style.bias())
        self.convs = DoubleConv(style, inputs, inputs // 2)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        out: Tensor = self.convs(torch.cat([skipped, self.up(x)], dim=1))
        return out


class UNet(nn.Module):
    """U-Net: images [batch, 3, size, size] -> pixel logits [batch, classes, size, size]."""

    def __init__(self, config: UNetConfig, style: Style) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.levels + 1)]
        self.first = DoubleConv(style, 3, config.width)
        self.downs = nn.ModuleList(down(style, width, 2 * width) for width in widths[:-1])
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
    """Build a U-Net with a batch of noise images and random pixel classes; the loss is cross-entropy per pixel."""
    levels, pixels = config.levels, (config.image_size, config.image_size)

    def batch() -> Batch:
        return (images(config.batch_size, config.image_size),), (labels(config.classes, config.batch_size, *pixels),)

    blocks = ("first", *numbered("downs", levels), *numbered("ups", levels))
    return training_step(name, style, seed, lambda: UNet(config, style), batch, pixel_loss, blocks)


# U-Net++ (Zhou et al. 2018): nested, densely joined decoders, without deep supervision.


@dataclass(frozen=True)
class UNetPlusPlusConfig:
    """Sizes of a U-Net++ and its batch; defaults: the paper's Table 2."""

    batch_size: int = 16
    image_size: int = 256
    width: int = 32
    """Channels at full resolution; each level below doubles them."""
    levels: int = 4

    def __post_init__(self) -> None:
        check_sizes("unetpp", self)
        check_divides("unetpp", "image_size", self.image_size, "2 ** levels", 2**self.levels)


class Nested(nn.Module):
    """Node X(i, j), j > 0: concatenates the row's nodes X(i, 0..j-1) with the upsampled X(i+1, j-1)."""

    def __init__(self, style: Style, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.convs = DoubleConv(style, inputs, outputs, bias=True)

    def forward(self, below: Tensor, *row: Tensor) -> Tensor:
        out: Tensor = self.convs(torch.cat([*row, self.up(below)], dim=1))
        return out


class UNetPlusPlus(nn.Module):
    """U-Net++: images [batch, 3, size, size] -> pixel logits of one class [batch, 1, size, size]."""

    def __init__(self, config: UNetPlusPlusConfig, style: Style) -> None:
        super().__init__()
        self.levels = config.levels
        widths = [config.width * 2**level for level in range(config.levels + 1)]
        self.nodes = nn.ModuleDict({"x0_0": DoubleConv(style, 3, widths[0], bias=True)})
        for i in range(1, config.levels + 1):
            self.nodes[f"x{i}_0"] = down(style, widths[i - 1], widths[i], bias=True)
        for j in range(1, config.levels + 1):
            for i in range(config.levels + 1 - j):
                self.nodes[f"x{i}_{j}"] = Nested(style, j * widths[i] + widths[i + 1], widths[i])
        self.head = style.conv(widths[0], 1, 1, bias=True)
        init_convolutions(self, mode="fan_in")

    def forward(self, x: Tensor) -> Tensor:
        rows = [[self.nodes["x0_0"](x)]]
        for i in range(1, self.levels + 1):
            rows.append([self.nodes[f"x{i}_0"](rows[-1][0])])
            # the diagonal that the new encoder node completes, upwards
            for j in range(1, i + 1):
                rows[i - j].append(self.nodes[f"x{i - j}_{j}"](rows[i - j + 1][j - 1], *rows[i - j]))
        out: Tensor = self.head(rows[0][self.levels])
        return out


def unetpp(config: UNetPlusPlusConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a U-Net++ with noise images and random binary masks; the loss is binary cross-entropy per pixel."""
    batch, size, levels = config.batch_size, config.image_size, config.levels

    def made() -> Batch:
        return (images(batch, size),), (labels(2, batch, 1, size, size).float(),)

    # in the order in which the network lists them
    nodes = (f"nodes.x{i}_{j}" for j in range(levels + 1) for i in range(levels + 1 - j))
    loss = functional.binary_cross_entropy_with_logits
    return training_step(name, style, seed, lambda: UNetPlusPlus(config, style), made, loss, nodes)
