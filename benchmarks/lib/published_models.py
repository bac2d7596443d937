"""Networks of the second set of published figures, operator by operator as their repositories have them.

What is saved for the backward decides a peak, so that a norm written out, a mask made anew and a copied key count.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.extensions.models.building import WRITTEN_OUT
from magis.extensions.models.encoders import BertConfig, BertEmbeddings, BertLayer


class VisionBlock(nn.Module):
    """Encoder block of torchvision's `VisionTransformer`: [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.dropout = nn.Dropout(0.0)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.0), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = self.dropout(y) + x
        out: Tensor = x + self.mlp(self.between(x))
        return out


class VisionTransformer(nn.Module):
    """torchvision's `vit_l_16` with a head of ten classes: images [batch, 3, 224, 224] -> logits [batch, 10]."""

    def __init__(self, layers: int = 24, width: int = 1024, heads: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 14 * 14 + 1, width))
        self.layers = nn.ModuleList(VisionBlock(width, heads, 4 * width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


class BookNorm(nn.Module):
    """Layer norm from scratch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(var + 1e-5)) + self.shift


class BookGelu(nn.Module):
    """GELU from scratch, by its tanh."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class BookAttention(nn.Module):
    """Causal attention; ``way``: "buffer" (a mask kept), "mask" (one made in each forward), "fused"."""

    def __init__(self, width: int, heads: int, length: int, dropout: float, way: str) -> None:
        super().__init__()
        self.heads, self.rate, self.way = heads, dropout, way
        if way == "fused":
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        if way == "buffer":
            self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self._fused(x) if self.way == "fused" else self._written_out(x)
        out: Tensor = self.out(mixed)
        return out

    def _fused(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.rate, is_causal=True)
        return mixed.transpose(1, 2).contiguous().view(x.shape)

    def _written_out(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        key, query, value = (
            part(x).view(len(x), length, self.heads, -1).transpose(1, 2) for part in (self.key, self.query, self.value)
        )
        scores = query @ key.transpose(2, 3)
        scores.masked_fill_(self._hidden(length, x), -math.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        mixed: Tensor = weights @ value
        return mixed.transpose(1, 2).reshape(x.shape)

    def _hidden(self, length: int, x: Tensor) -> Tensor:
        if self.way == "buffer":
            return self.get_buffer("mask").bool()[:length, :length]
        return torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)


class BookBlock(nn.Module):
    """Pre-norm block; ``scratch``: norm and GELU are written out."""

    def __init__(self, width: int, heads: int, length: int, dropout: float, way: str, scratch: bool) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = BookNorm if scratch else nn.LayerNorm
        gelu = BookGelu() if scratch else nn.GELU(approximate="tanh")
        self.before, self.between = norm(width), norm(width)
        self.attention = BookAttention(width, heads, length, dropout, way)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.attention(self.before(x))) + x
        out: Tensor = self.dropout(self.mlp(self.between(x))) + x
        return out


class BookGpt(nn.Module):
    """The GPT of 124 million parameters (163 with its own head): int64 [batch, length] -> logits."""

    def __init__(
        self, way: str, *, scratch: bool, length: int = 1024, layers: int = 12, width: int = 768,
        vocabulary: int = 50257,
    ) -> None:  # fmt: skip
        super().__init__()
        self.word, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(BookBlock(width, 12, length, 0.1, way, scratch) for _ in range(layers))
        self.norm: nn.Module = BookNorm(width) if scratch else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.dropout(self.word(token_ids) + self.position(torch.arange(token_ids.shape[1])))
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


class WrittenNorm(nn.Module):
    """RMS norm written out, in float32: what litgpt and torchtune have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight


class WrittenLayer(nn.Module):
    """Llama's layer with keys and values copied to every head.

    ``packed``: one product makes queries, keys and values; ``wide``: positions are turned in float32.
    """

    def __init__(self, width: int, inner: int, heads: int, groups: int, *, packed: bool, wide: bool) -> None:
        super().__init__()
        self.head_width, self.repeats, self.wide = width // heads, heads // groups, wide
        sizes = self.sizes = (width, groups * self.head_width, groups * self.head_width)
        self.before, self.between = WrittenNorm(width), WrittenNorm(width)
        self.mixed = nn.ModuleList(nn.Linear(width, size, bias=False) for size in ([sum(sizes)] if packed else sizes))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self._projected(x))
        key, value = (part.repeat_interleave(self.repeats, dim=1) for part in (key, value))
        query, key = self._turned(query, cos, sin), self._turned(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.out(mixed.transpose(1, 2).reshape(x.shape)) + x
        y = self.between(x)
        out: Tensor = self.down(functional.silu(self.gate(y)) * self.up(y)) + x
        return out

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.before(x)
        made = tuple(part(y) for part in self.mixed)
        return made if len(made) > 1 else made[0].split(self.sizes, dim=-1)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        given = x.float() if self.wide else x
        first, second = given.chunk(2, dim=-1)
        return (given * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class WrittenLlama(nn.Module):
    """Llama-like decoder as litgpt, torchtune and torchtitan write it: int64 [batch, length] -> logits.

    ``tied``: the head is the embedding. The rest is that of `WrittenLayer`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, layers: int, length: int, width: int, inner: int, heads: int, groups: int, vocabulary: int,
        *, packed: bool = True, wide: bool = False, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        options = {"packed": packed, "wide": wide}
        self.word = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(WrittenLayer(width, inner, heads, groups, **options) for _ in range(layers))
        self.norm, self.head = WrittenNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.word.weight
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(length, width // heads), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.word(token_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        out: Tensor = self.head(self.norm(x))
        return out


class BertClassifier(nn.Module):
    """Hugging Face's BERT with a classifier, attention written out: int64 [batch, length] twice -> [batch, 2]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config, WRITTEN_OUT)
        self.layers = nn.ModuleList(BertLayer(config, WRITTEN_OUT) for _ in range(config.layers))
        self.pooler, self.dropout = nn.Linear(config.width, config.width), nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.width, 2)

    def forward(self, token_ids: Tensor, type_ids: Tensor) -> Tensor:
        x = self.embeddings(token_ids, type_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        return out
