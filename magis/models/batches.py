"""Seeds, synthetic batches, losses and initial weights; all of it works on real and on fake tensors alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "image_loss",
    "images",
    "init_convolutions",
    "init_transformer",
    "labels",
    "pixel_loss",
    "seeded",
    "token_loss",
    "tokens",
]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generator inside the block and give it back as it was; other devices' stay untouched."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def images(batch: int, size: int) -> Tensor:
    """Normal noise [batch, 3, size, size]."""
    return torch.randn(batch, 3, size, size)


def labels(classes: int, *shape: int) -> Tensor:
    """Uniform class numbers, int64, of the given shape."""
    return torch.randint(0, classes, shape)


def tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Token numbers and, as the target of each, the next token; int64 [batch, length] both.

    One sequence longer by one is cut twice, so that the logits need not be shifted, which would copy them.
    """
    text = torch.randint(0, vocabulary, (batch, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def image_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [batch, classes, ...] against class numbers [batch, ...]."""
    return functional.cross_entropy(logits, target)


def pixel_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [batch, classes, height, width] against class numbers [batch, height, width].

    In float32 whatever the network's data type: the number of pixels overflows float16, which makes the mean 0.
    """
    return functional.cross_entropy(logits.float(), target)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all tokens of logits [batch, length, vocabulary] against token numbers [batch,
    length].

    No target is ever the ignored index, so the mean is over a number of tokens known beforehand.
    """
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def init_transformer(module: nn.Module, std: float = 0.02) -> None:
    """Normal weights of the given standard deviation for linear layers and embeddings, zero biases."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def init_convolutions(module: nn.Module, mode: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """He initialization of all convolutions, zero biases."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(part.weight, mode=mode, nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
