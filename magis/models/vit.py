"""Vision transformer (Dosovitskiy et al. 2021), the classifier with a class token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from magis.capture.workload import Workload
from magis.models.attention import FeedForward, SelfAttention
from magis.models.building import (
    Style,
    check_divides,
    check_sizes,
    image_loss,
    images,
    init_transformer,
    labels,
    seeded,
)

VIT_SIZES = {
    # layers, width, feed-forward width, heads, patch pixels
    "tiny-16": (12, 192, 768, 3, 16),
    "small-16": (12, 384, 1536, 6, 16),
    "base-16": (12, 768, 3072, 12, 16),
    "base-32": (12, 768, 3072, 12, 32),
    "large-16": (24, 1024, 4096, 16, 16),
    "large-32": (24, 1024, 4096, 16, 32),
    "huge-14": (32, 1280, 5120, 16, 14),
}


@dataclass(frozen=True)
class VitConfig:
    """Sizes of one ViT and its batch; the defaults are ViT-base/16 of the paper's Table 2.

    Without dropout, like the released configurations and torchvision's.
    """

    batch_size: int = 64
    image_size: int = 224
    patch_size: int = 16
    layers: int = 12
    width: int = 768
    inner: int = 3072
    heads: int = 12
    classes: int = 1000
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes("vit", self)
        check_divides("vit", "width", self.width, "heads", self.heads)
        check_divides("vit", "image_size", self.image_size, "patch_size", self.patch_size)


class VitLayer(nn.Module):
    """Pre-norm encoder layer, [batch, length, width] -> the same."""

    def __init__(self, config: VitConfig, style: Style) -> None:
        super().__init__()
        self.attention_norm = style.layer_norm(config.width, eps=1e-6)
        self.attention = SelfAttention(style, config.width, config.heads, packed=True)
        self.dropout = style.dropout(config.dropout)
        self.norm = style.layer_norm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(
            style, config.width, config.inner, activation=style.gelu(), dropout=config.dropout, inside=True
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.feed_forward(self.norm(x))
        return out


class Vit(nn.Module):
    """Images [batch, 3, size, size] -> class logits [batch, classes]."""

    def __init__(self, config: VitConfig, style: Style) -> None:
        super().__init__()
        patch = config.patch_size
        self.patches = nn.Conv2d(3, config.width, patch, stride=patch, bias=style.bias())
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        length = (config.image_size // patch) ** 2 + 1
        self.positions = nn.Parameter(torch.empty(1, length, config.width)) if style.positions else None
        self.dropout = style.dropout(config.dropout)
        self.layers = nn.ModuleList(VitLayer(config, style) for _ in range(config.layers))
        self.norm = style.layer_norm(config.width, eps=1e-6)
        self.head = style.linear(config.width, config.classes)
        init_transformer(self)
        if self.positions is not None:
            nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        if self.positions is not None:
            x = x + self.positions
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


def vit(config: VitConfig, style: Style, name: str, seed: int) -> Workload:
    """ViT with a batch of noise images and random classes."""
    with seeded(seed):
        module = Vit(config, style)
        inputs = (images(config.batch_size, config.image_size),)
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
