"""Parts that the transformers share: multi-head self-attention, masks and the plain feed-forward network."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.models.building import Style


class SelfAttention(nn.Module):
    """Multi-head self-attention [batch, length, width] -> [batch, length, width].

    `packed` projects query, key and value with one matrix (ViT, BTLM), otherwise with three (BERT,
    GPT-Neo). `scale` multiplies the scores, 1/sqrt(head width) by default. `forward` takes an additive mask
    that broadcasts to [batch, heads, length, length]; `causal` without a mask leaves the masking to the
    fused kernel. In the seed's style attention is written out and every mask has to be given.
    """

    def __init__(
        self,
        style: Style,
        width: int,
        heads: int,
        *,
        packed: bool,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.scale = self.head_width**-0.5 if scale is None else scale
        self.explicit = style.explicit_attention
        self.dropout = 0.0 if style.seed else dropout
        self.causal = causal
        self.qkv = style.linear(width, 3 * width, bias=bias) if packed else None
        if not packed:
            self.query = style.linear(width, width, bias=bias)
            self.key = style.linear(width, width, bias=bias)
            self.value = style.linear(width, width, bias=bias)
        self.out = style.linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = (self.heads, self.head_width)
        q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in self._project(x))
        mixed = self._explicit(q, k, v, mask) if self.explicit else self._fused(q, k, v, mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is None:
            return self.query(x), self.key(x), self.value(x)
        packed: Tensor = self.qkv(x)
        return packed.chunk(3, dim=-1)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
            scale=self.scale,
        )

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # the narrow operand is scaled, not the scores, which are length / head width times as large
        scores = torch.matmul(q * self.scale, k.transpose(-2, -1))
        if mask is not None:
            scores = scores + mask.to(scores.dtype)
        weights = torch.softmax(scores, dim=-1)
        if self.dropout:
            weights = functional.dropout(weights, self.dropout, self.training)
        return torch.matmul(weights, v)


class FeedForward(nn.Module):
    """Two linear layers with an activation between, [..., width] -> [..., width], then dropout."""

    def __init__(
        self,
        style: Style,
        width: int,
        inner: int,
        *,
        activation: nn.Module,
        dropout: float = 0.0,
        inside: bool = False,
    ) -> None:
        super().__init__()
        self.up = style.linear(width, inner)
        self.activation = activation
        # `inside`: a dropout after the activation as well (ViT)
        self.inner_dropout = style.dropout(dropout if inside else 0.0)
        self.down = style.linear(inner, width)
        self.dropout = style.dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner_dropout(self.activation(self.up(x)))
        out: Tensor = self.dropout(self.down(hidden))
        return out


def causal_mask(length: int, window: int | None = None) -> Tensor:
    """Additive mask [length, length]: 0 where a token (row) sees another (column), -inf elsewhere.

    A token sees itself and the tokens before it; with a `window`, only the nearest `window` of those.
    """
    position = torch.arange(length)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(length, length).masked_fill(hidden, -math.inf)


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head (Press et al. 2022): a geometric series, for a head count that is no power
    of two filled up with every other slope of the next power's series."""
    nearest = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / nearest) for i in range(nearest)]
    return slopes + [2 ** (-4 * (2 * i + 1) / nearest) for i in range(heads - nearest)]
