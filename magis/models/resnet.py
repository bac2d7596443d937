"""ResNet (He et al. 2016; stride in the 3x3 convolution, as in torchvision) and wide ResNet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from magis.capture.workload import Workload
from magis.models.building import SizeError, Style, check_sizes, image_loss, images, init_convolutions, labels, seeded

RESNETS = {
    # blocks of the four stages, expansion of a block's output (1: basic block, 4: bottleneck), widening
    "resnet34": ((3, 4, 6, 3), 1, 1),
    "resnet50": ((3, 4, 6, 3), 4, 1),
    "resnet101": ((3, 4, 23, 3), 4, 1),
    "resnet152": ((3, 8, 36, 3), 4, 1),
    "wide_resnet50_2": ((3, 4, 6, 3), 4, 2),
    "wide_resnet101_2": ((3, 4, 23, 3), 4, 2),
}


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of one ResNet and its batch; the defaults are ResNet-50 of the paper's Table 2."""

    batch_size: int = 64
    image_size: int = 224
    stages: tuple[int, ...] = (3, 4, 6, 3)
    expansion: int = 4
    widening: int = 1
    width: int = 64
    """Channels of the stem and of the first stage's inner convolutions."""
    classes: int = 1000

    def __post_init__(self) -> None:
        check_sizes("resnet", self)
        if self.expansion not in (1, 4):
            raise SizeError(f"resnet: expansion must be 1 (basic block) or 4 (bottleneck), not {self.expansion}")


class Block(nn.Module):
    """Residual block [batch, inputs, h, w] -> [batch, channels x expansion, h / stride, w / stride].

    Basic (two 3x3 convolutions) if the expansion is 1, else bottleneck (1x1, 3x3, 1x1).
    """

    def __init__(self, config: ResNetConfig, style: Style, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = channels * config.expansion
        if config.expansion == 1:
            plan = [(inputs, channels, 3, stride), (channels, outputs, 3, 1)]
        else:
            inner = channels * config.widening
            plan = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
        layers: list[nn.Module] = []
        for i, (before, after, kernel, step) in enumerate(plan):
            layers += [style.conv(before, after, kernel, stride=step), style.batch_norm(after)]
            if i < len(plan) - 1:
                layers.append(style.relu())
        self.branch = nn.Sequential(*layers)
        self.relu = style.relu()
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(style.conv(inputs, outputs, 1, stride=stride), style.batch_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        y = y + (x if self.shortcut is None else self.shortcut(x))
        out: Tensor = self.relu(y)
        return out

    def damp(self, factor: float) -> None:
        """Scale the branch's last convolution, which keeps a deep net without BatchNorm from blowing up."""
        last = [layer for layer in self.branch if isinstance(layer, nn.Conv2d)][-1]
        with torch.no_grad():
            last.weight.mul_(factor)


class ResNet(nn.Module):
    """Images [batch, 3, size, size] -> class logits [batch, classes]."""

    def __init__(self, config: ResNetConfig, style: Style) -> None:
        super().__init__()
        self.stem = style.conv(3, config.width, 7, stride=2)
        self.stem_norm = style.batch_norm(config.width)
        self.stem_relu = style.relu()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks = []
        inputs = config.width
        for stage, count in enumerate(config.stages):
            channels = config.width * 2**stage
            for i in range(count):
                blocks.append(Block(config, style, inputs, channels, 2 if stage > 0 and i == 0 else 1))
                inputs = channels * config.expansion
        self.blocks = nn.ModuleList(blocks)
        self.head = style.linear(inputs, config.classes)
        init_convolutions(self)
        if style.seed:
            for block in blocks:
                block.damp(len(blocks) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem_relu(self.stem_norm(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out


def resnet(config: ResNetConfig, style: Style, name: str, seed: int) -> Workload:
    """A ResNet with a batch of noise images and random classes."""
    with seeded(seed):
        module = ResNet(config, style)
        inputs = (images(config.batch_size, config.image_size),)
        targets = (labels(config.classes, config.batch_size),)
    return Workload(
        name=name,
        module=module,
        inputs=inputs,
        targets=targets,
        loss_fn=image_loss,
        optimizer=style.optimizer,
        blocks=tuple(f"blocks.{i}" for i in range(sum(config.stages))),
        explicit_attention=style.explicit_attention,
    )
