"""Convolutional networks ResNet (He et al. 2016), VGG (2015), DenseNet-BC (Huang et al. 2017), and a perceptron."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from magis.capture.workload import Workload
from magis.extensions.models.building import (
    SizeError,
    Style,
    check_sizes,
    image_batch,
    image_loss,
    init_convolutions,
    labels,
    numbered,
    training_step,
)

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
    """Sizes of a ResNet and its batch; defaults: ResNet-50 in the paper's Table 2."""

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
    """Residual block [batch, inputs, h, w] -> [batch, channels x expansion, h / stride, w / stride]: basic (two 3x3
    convolutions) if the expansion is 1, else bottleneck (1x1, 3x3, 1x1)."""

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
        """Scale the last convolution of the branch: without BatchNorm, activations of a deep net would explode."""
        last = [layer for layer in self.branch if isinstance(layer, nn.Conv2d)][-1]
        with torch.no_grad():
            last.weight.mul_(factor)


class ResNet(nn.Module):
    """ResNet: images [batch, 3, size, size] -> class logits [batch, classes]."""

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


def _classifier(
    network: Callable[..., nn.Module],
    config: ResNetConfig | VggConfig | DenseNetConfig,
    style: Style,
    name: str,
    seed: int,
    blocks: Iterable[str],
) -> Workload:
    """Build an image classifier with a batch of noise images and random classes."""
    batch = config.batch_size, config.image_size, config.classes
    return training_step(
        name, style, seed, lambda: network(config, style), lambda: image_batch(*batch), image_loss, blocks
    )


def resnet(config: ResNetConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a ResNet with a batch of noise images and random classes."""
    return _classifier(ResNet, config, style, name, seed, numbered("blocks", sum(config.stages)))


# VGG (Simonyan and Zisserman 2015), without BatchNorm as published.

VGGS = {
    # convolutions of the five stages
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}


@dataclass(frozen=True)
class VggConfig:
    """Sizes of a VGG and its batch; defaults: VGG-16 at 224 pixels."""

    batch_size: int = 64
    image_size: int = 224
    stages: tuple[int, ...] = (2, 2, 3, 3, 3)
    width: int = 64
    """Channels of the first stage; each stage doubles them, up to eight times as many."""
    hidden: int = 4096
    """Width of the classifier's two hidden layers."""
    classes: int = 1000
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_sizes("vgg", self)
        if self.image_size >> len(self.stages) == 0:
            raise SizeError(f"vgg: image_size must be at least {2 ** len(self.stages)}, not {self.image_size}")


class Vgg(nn.Module):
    """VGG: images [batch, 3, size, size] -> class logits [batch, classes]."""

    def __init__(self, config: VggConfig, style: Style) -> None:
        super().__init__()
        stages = []
        inputs = 3
        for stage, count in enumerate(config.stages):
            channels = config.width * min(2**stage, 8)
            layers: list[nn.Module] = []
            for _ in range(count):
                layers += [style.conv(inputs, channels, 3, bias=True), style.relu()]
                inputs = channels
            stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.stages = nn.ModuleList(stages)
        # the published classifier sees the whole map, 7 x 7 at 224 pixels
        pixels = (config.image_size >> len(config.stages)) ** 2
        self.classifier = nn.Sequential(
            style.linear(inputs * pixels, config.hidden),
            style.relu(),
            style.dropout(config.dropout),
            style.linear(config.hidden, config.hidden),
            style.relu(),
            style.dropout(config.dropout),
            style.linear(config.hidden, config.classes),
        )
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.classifier(x.flatten(1))
        return out


def vgg(config: VggConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a VGG with a batch of noise images and random classes."""
    return _classifier(Vgg, config, style, name, seed, numbered("stages", len(config.stages)))


# DenseNet-BC (Huang et al. 2017), as in torchvision.

DENSENETS = {
    # layers of the four dense blocks
    "densenet121": (6, 12, 24, 16),
    "densenet169": (6, 12, 32, 32),
    "densenet201": (6, 12, 48, 32),
}


@dataclass(frozen=True)
class DenseNetConfig:
    """Sizes of a DenseNet and its batch; defaults: DenseNet-121 at 224 pixels."""

    batch_size: int = 64
    image_size: int = 224
    stages: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    """Channels that each layer adds; the stem has twice as many, a bottleneck four times as many."""
    classes: int = 1000

    def __post_init__(self) -> None:
        check_sizes("densenet", self)


class DenseLayer(nn.Module):
    """DenseNet layer: all earlier features [batch, c_i, h, w] -> `growth` new channels [batch, growth, h, w]."""

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
    """Dense block with a transition that halves channels and resolution; the last stage has no transition."""

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
    """DenseNet-BC: images [batch, 3, size, size] -> class logits [batch, classes]."""

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
    """Build a DenseNet with a batch of noise images and random classes."""
    blocks = (f"stages.{i}.layers.{j}" for i, count in enumerate(config.stages) for j in range(count))
    return _classifier(DenseNet, config, style, name, seed, blocks)


# A plain multi-layer perceptron.


@dataclass(frozen=True)
class MlpConfig:
    """Sizes of a multi-layer perceptron and its batch."""

    batch_size: int = 16384
    inputs: int = 1024
    hidden: int = 1024
    layers: int = 12
    """Number of hidden layers (linear, ReLU) before the classifier."""
    classes: int = 1000

    def __post_init__(self) -> None:
        check_sizes("mlp", self)


class Layer(nn.Module):
    """Hidden layer (linear, ReLU): [batch, inputs] -> [batch, outputs]."""

    def __init__(self, style: Style, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = style.linear(inputs, outputs)
        self.relu = style.relu()
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.linear(x))
        return out


class Mlp(nn.Module):
    """Multi-layer perceptron: features [batch, inputs] -> class logits [batch, classes]."""

    def __init__(self, config: MlpConfig, style: Style) -> None:
        super().__init__()
        widths = [config.inputs] + [config.hidden] * config.layers
        self.layers = nn.ModuleList(Layer(style, a, b) for a, b in pairwise(widths))
        self.head = style.linear(config.hidden, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def mlp(config: MlpConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a multi-layer perceptron with a batch of noise and random classes."""
    return training_step(
        name,
        style,
        seed,
        lambda: Mlp(config, style),
        lambda: ((torch.randn(config.batch_size, config.inputs),), (labels(config.classes, config.batch_size),)),
        image_loss,
        numbered("layers", config.layers),
    )
