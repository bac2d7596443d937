"""VGG (Simonyan and Zisserman 2015), without BatchNorm as published."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from magis.capture.workload import Workload
from magis.models.building import SizeError, Style, check_sizes, image_loss, images, init_convolutions, labels, seeded

VGGS = {
    # convolutions of the five stages
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}


@dataclass(frozen=True)
class VggConfig:
    """Sizes of one VGG and its batch; the defaults are VGG-16 at 224 pixels."""

    batch_size: int = 64
    image_size: int = 224
    stages: tuple[int, ...] = (2, 2, 3, 3, 3)
    width: int = 64
    """Channels of the first stage; they double per stage up to eight times as many."""
    hidden: int = 4096
    """Width of the classifier's two inner layers."""
    classes: int = 1000
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_sizes("vgg", self)
        if self.image_size >> len(self.stages) == 0:
            raise SizeError(f"vgg: image_size must be at least {2 ** len(self.stages)}, not {self.image_size}")


class Vgg(nn.Module):
    """Images [batch, 3, size, size] -> class logits [batch, classes]."""

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
    """A VGG with a batch of noise images and random classes."""
    with seeded(seed):
        module = Vgg(config, style)
        inputs = (images(config.batch_size, config.image_size),)
        targets = (labels(config.classes, config.batch_size),)
    return Workload(
        name=name,
        module=module,
        inputs=inputs,
        targets=targets,
        loss_fn=image_loss,
        optimizer=style.optimizer,
        blocks=tuple(f"stages.{i}" for i in range(len(config.stages))),
        explicit_attention=style.explicit_attention,
    )
