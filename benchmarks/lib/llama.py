"""Llama-like decoders of any size: RMS norms, grouped attention with rotary positions, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

M = TypeVar("M")


@dataclass(frozen=True)
class Sizes:
    """Of a decoder; as many heads of keys and values as ``groups``."""

    length: int
    width: int
    inner: int
    heads: int
    groups: int
    vocabulary: int


class LlamaLayer(nn.Module):
    """[batch, length, width] -> the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width, self.grouped = sizes.width // sizes.heads, sizes.groups < sizes.heads
        width, few, inner = sizes.width, self.head_width * sizes.groups, sizes.inner
        linear = partial(nn.Linear, bias=False)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = linear(width, width), linear(width, few), linear(width, few)
        self.out = linear(width, width)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.before(x)
        query, key, value = (
            each(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        query, key = (each * cos + turned(each) * sin for each in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


def in_bfloat16(make: Callable[[], M]) -> M:
    """What a function makes while bfloat16 is torch's default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def turned(x: Tensor) -> Tensor:
    """Pairs of channels turned by a right angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Llama(nn.Module):
    """Token numbers, int64 [batch, length] -> logits [batch, length, vocabulary]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int, sizes: Sizes) -> None:
        super().__init__()
        self.word = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.register_buffer("cos", torch.zeros(sizes.length, sizes.width // sizes.heads), persistent=False)
        self.register_buffer("sin", torch.zeros(sizes.length, sizes.width // sizes.heads), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.word(token_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        out: Tensor = self.head(self.norm(x))
        return out
