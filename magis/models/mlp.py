"""A plain multi-layer perceptron."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from magis.capture.workload import Workload
from magis.models.building import Style, check_sizes, image_loss, labels, seeded


@dataclass(frozen=True)
class MlpConfig:
    """Sizes of one perceptron and its batch."""

    batch_size: int = 16384
    inputs: int = 1024
    hidden: int = 1024
    layers: int = 12
    """Linear layers with an activation; the classifier comes on top."""
    classes: int = 1000

    def __post_init__(self) -> None:
        check_sizes("mlp", self)


class Layer(nn.Module):
    """Linear, ReLU: [batch, inputs] -> [batch, outputs]."""

    def __init__(self, style: Style, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = style.linear(inputs, outputs)
        self.relu = style.relu()
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.linear(x))
        return out


class Mlp(nn.Module):
    """Features [batch, inputs] -> class logits [batch, classes]."""

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
    """A perceptron with a batch of noise and random classes."""
    with seeded(seed):
        module = Mlp(config, style)
        inputs = (torch.randn(config.batch_size, config.inputs),)
        targets = (labels(config.classes, config.batch_size),)
    return Workload(
        name=name,
        module=module,
        inputs=inputs,
        targets=targets,
        loss_fn=image_loss,
        optimizer=style.optimizer,
        blocks=tuple(f"layers.{i}" for i in range(config.layers)),
        explicit_attention=style.explicit_attention,
    )
