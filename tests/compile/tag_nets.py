"""Networks that only these tests know: a llama and a convolutional network, each with its batch and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Subject: TypeAlias = tuple[nn.Module, tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]


class Decoder(nn.Module):
    """[batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        parts = self.mixed(self.before(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        query, key, value = parts[0], parts[1], parts[2]
        query, key = (each * turn.cos() + each.roll(1, -1) * turn.sin() for each in (query, key))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.between(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Token numbers [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Decoder(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.width = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        turn = torch.arange(tokens.shape[1])[:, None] / 10.0 ** torch.linspace(0, 3, self.width)
        for layer in self.layers:
            x = layer(x, turn)
        out: Tensor = self.head(self.norm(x))
        return out


class Squeezed(nn.Module):
    """A depthwise convolution between two narrow ones, its channels weighed by their means."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.deep = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner), nn.GroupNorm(4, inner), nn.GELU()
        )
        self.weigh = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, inner, 1), nn.Sigmoid())
        self.narrow = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.wide(x))
        out: Tensor = x + self.narrow(y * self.weigh(y))
        return out


def llama() -> Subject:
    """Three decoders of width 32."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 97, (4, 40))
    return (
        Llama(3, 32, 4, 97),
        (tokens, tokens.roll(-1, 1)),
        lambda out, to: F.cross_entropy(out.flatten(0, 1), to.flatten()),
    )


def convnet() -> Subject:
    """Two blocks, a pool between them."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    module = nn.Sequential(start, Squeezed(8, 16), nn.MaxPool2d(2), Squeezed(8, 24), end)
    return module, (torch.randn(8, 3, 24, 24), torch.randint(0, 10, (8,))), F.cross_entropy


def dropouts() -> Subject:
    """Six layers with dropout."""
    torch.manual_seed(0)
    parts = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3))]
    return nn.Sequential(*parts), (torch.randn(2048, 32), torch.randn(2048, 32)), F.mse_loss
