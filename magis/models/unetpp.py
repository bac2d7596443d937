"""U-Net++ (Zhou et al. 2018): nested, densely joined decoders, without deep supervision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.models.batches import images, init_convolutions, labels, seeded
from magis.models.sizes import check_divides, check_sizes
from magis.models.style import Style
from magis.models.unet import DoubleConv
from magis.models.workload import Workload

__all__ = ["UNetPlusPlus", "UNetPlusPlusConfig", "unetpp"]


@dataclass(frozen=True)
class UNetPlusPlusConfig:
    """Sizes of one U-Net++ and its batch; the defaults are those of the paper's Table 2."""

    batch_size: int = 16
    image_size: int = 256
    width: int = 32
    """Channels at full resolution; they double at each of the levels below."""
    levels: int = 4

    def __post_init__(self) -> None:
        check_sizes("unetpp", self)
        check_divides("unetpp", "image_size", self.image_size, "2 ** levels", 2**self.levels)


class Encoder(nn.Module):
    """Node X(i, 0), i > 0: half the resolution, [batch, inputs, h, w] -> [batch, outputs, h/2, w/2]."""

    def __init__(self, style: Style, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.convs = DoubleConv(style, inputs, outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.convs(self.pool(x))
        return out


class Nested(nn.Module):
    """Node X(i, j), j > 0: joins the row's nodes X(i, 0..j-1) with the upsampled X(i+1, j-1)."""

    def __init__(self, style: Style, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.convs = DoubleConv(style, inputs, outputs, bias=True)

    def forward(self, below: Tensor, *row: Tensor) -> Tensor:
        out: Tensor = self.convs(torch.cat([*row, self.up(below)], dim=1))
        return out


class UNetPlusPlus(nn.Module):
    """Images [batch, 3, size, size] -> pixel logits of one class [batch, 1, size, size]."""

    def __init__(self, config: UNetPlusPlusConfig, style: Style) -> None:
        super().__init__()
        self.levels = config.levels
        widths = [config.width * 2**level for level in range(config.levels + 1)]
        self.nodes = nn.ModuleDict({"x0_0": DoubleConv(style, 3, widths[0], bias=True)})
        for i in range(1, config.levels + 1):
            self.nodes[f"x{i}_0"] = Encoder(style, widths[i - 1], widths[i])
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
    """U-Net++ with a batch of noise images and a random binary mask, binary cross-entropy per pixel."""
    with seeded(seed):
        module = UNetPlusPlus(config, style)
        inputs = (images(config.batch_size, config.image_size),)
        targets = (labels(2, config.batch_size, 1, config.image_size, config.image_size).float(),)
    return Workload(
        name=name,
        module=module,
        inputs=inputs,
        targets=targets,
        loss_fn=functional.binary_cross_entropy_with_logits,
        optimizer=style.optimizer,
        blocks=tuple(f"nodes.{node}" for node in module.nodes),
        explicit_attention=style.explicit_attention,
    )
