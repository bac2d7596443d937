"""DenseNet-BC (Huang et al. 2017), as in torchvision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from magis.capture.workload import Workload
from magis.models.building import Style, check_sizes, image_loss, images, init_convolutions, labels, seeded

DENSENETS = {
    # layers of the four dense blocks
    "densenet121": (6, 12, 24, 16),
    "densenet169": (6, 12, 32, 32),
    "densenet201": (6, 12, 48, 32),
}


@dataclass(frozen=True)
class DenseNetConfig:
    """Sizes of one DenseNet and its batch; the defaults are DenseNet-121 at 224 pixels."""

    batch_size: int = 64
    image_size: int = 224
    stages: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    """Channels that each layer adds; the stem has twice as many, a bottleneck four times."""
    classes: int = 1000

    def __post_init__(self) -> None:
        check_sizes("densenet", self)


class DenseLayer(nn.Module):
    """All features so far, [batch, c_i, h, w] each -> `growth` new channels [batch, growth, h, w]."""

    def __init__(self, style: Style, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = style.batch_norm(inputs)
        self.relu1 = style.relu()
        self.conv1 = style.conv(inputs, 4 * growth, 1)
        self.norm2 = style.batch_norm(4 * growth)
        self.relu2 = style.relu()
        self.conv2 = style.conv(4 * growth, growth, 3)

    def forward(self, *features: Tensor) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, dim=1))))
        out: Tensor = self.conv2(self.relu2(self.norm2(x)))
        return out


class DenseStage(nn.Module):
    """A dense block and, unless it is the last, the transition that halves channels and resolution."""

    def __init__(self, style: Style, inputs: int, layers: int, growth: int, *, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(style, inputs + i * growth, growth) for i in range(layers))
        channels = inputs + layers * growth
        self.norm = style.batch_norm(channels)
        self.relu = style.relu()
        self.transition: nn.Module | None = None
        if not last:
            self.transition = nn.Sequential(style.conv(channels, channels // 2, 1), nn.AvgPool2d(2))
        self.outputs = channels if last else channels // 2

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        x = self.relu(self.norm(torch.cat(features, dim=1)))
        return x if self.transition is None else self.transition(x)


class DenseNet(nn.Module):
    """Images [batch, 3, size, size] -> class logits [batch, classes]."""

    def __init__(self, config: DenseNetConfig, style: Style) -> None:
        super().__init__()
        channels = 2 * config.growth
        self.stem = style.conv(3, channels, 7, stride=2)
        self.stem_norm = style.batch_norm(channels)
        self.stem_relu = style.relu()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        stages = []
        for i, layers in enumerate(config.stages):
            stages.append(DenseStage(style, channels, layers, config.growth, last=i == len(config.stages) - 1))
            channels = stages[-1].outputs
        self.stages = nn.ModuleList(stages)
        self.head = style.linear(channels, config.classes)
        init_convolutions(self, mode="fan_in")

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem_relu(self.stem_norm(self.stem(x))))
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out


def densenet(config: DenseNetConfig, style: Style, name: str, seed: int) -> Workload:
    """A DenseNet with a batch of noise images and random classes."""
    with seeded(seed):
        module = DenseNet(config, style)
        inputs = (images(config.batch_size, config.image_size),)
        targets = (labels(config.classes, config.batch_size),)
    return Workload(
        name=name,
        module=module,
        inputs=inputs,
        targets=targets,
        loss_fn=image_loss,
        optimizer=style.optimizer,
        blocks=tuple(f"stages.{i}.layers.{j}" for i, count in enumerate(config.stages) for j in range(count)),
        explicit_attention=style.explicit_attention,
    )
