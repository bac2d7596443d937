"""Networks of the published peaks of compiled runs, operator by operator as their repositories have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .published_models import WrittenNorm

Called = TypeVar("Called", bound=Callable[..., Any])


def eager(call: Called) -> Called:
    """A function that runs in eager mode with all that it calls."""
    made: Called = torch.compiler.disable(call)
    return made


def regional(call: Called) -> Called:
    """A function that runs in eager mode, while each function that it calls is compiled by itself."""
    made: Called = torch.compiler.disable(call, recursive=False)
    return made


# litgpt, as lightning-thunder's benchmark runs it.


class LitLayer(nn.Module):
    """litgpt's `Block` with as many keys as queries; ``rotary``: share of a head whose positions are turned.

    ``neox``: layer norms, biases, GELU, and both branches read the layer's input; else RMS norms and Llama's MLP.
    """

    def __init__(self, width: int, inner: int, heads: int, rotary: float, *, neox: bool) -> None:
        super().__init__()
        self.heads, self.head_width, self.neox = heads, width // heads, neox
        self.turned = int(rotary * self.head_width)
        self.before, self.between = (nn.LayerNorm(width) if neox else WrittenNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=neox), nn.Linear(width, width, bias=neox)
        self.up, self.down = nn.Linear(width, inner, bias=neox), nn.Linear(inner, width, bias=neox)
        self.gate = None if neox else nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = self._mixed(self.before(x), cos, sin)
        if self.neox:
            both: Tensor = self._mlp(self.between(x)) + mixed + x
            return both
        x = mixed + x
        return self._mlp(self.between(x)) + x

    def _mixed(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, self.heads, 3, self.head_width).permute(0, 2, 3, 1, 4)
        query, key, value = (each.reshape(batch, -1, length, self.head_width) for each in parts.split(1, dim=2))
        query, key = self._placed(query, cos, sin), self._placed(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def _placed(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        given = x[..., : self.turned]
        half = self.turned // 2
        around = torch.cat((-given[..., half:], given[..., :half]), dim=-1)
        return torch.cat(((given * cos + around * sin).to(x.dtype), x[..., self.turned :]), dim=-1)

    def _mlp(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        wide = functional.gelu(wide) if self.gate is None else functional.silu(self.gate(x)) * wide
        out: Tensor = self.down(wide)
        return out


class LitDecoder(nn.Module):
    """litgpt's `GPT` with a head of its own: int64 [batch, length] -> logits. The rest is that of `LitLayer`."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, layers: int, length: int, width: int, inner: int, heads: int, vocabulary: int, rotary: float,
        *, neox: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.word, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(LitLayer(width, inner, heads, rotary, neox=neox) for _ in range(layers))
        self.norm = nn.LayerNorm(width) if neox else WrittenNorm(width)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(length, int(rotary * (width // heads))), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        length = token_ids.shape[1]
        x = self.word(token_ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        out: Tensor = self.head(self.norm(x))
        return out


# torchtune: each layer is compiled by itself, and so is the loss.


@regional
def packed_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention in a call of its own, which ends a layer's graph: that of packed sequences is called like this."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class TuneLayer(nn.Module):
    """torchtune's `TransformerSelfAttentionLayer` of Llama 3: [batch, length, width] -> the same."""

    def __init__(self, width: int, inner: int, heads: int, groups: int, *, packed: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width, self.packed = heads, groups, width // heads, packed
        self.before, self.between = WrittenNorm(width), WrittenNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.head_width, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = self._mixed(self.before(x), places) + x
        y = self.between(x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out

    def _mixed(self, x: Tensor, places: Tensor) -> Tensor:
        query, key, value = (
            part(x).view(*x.shape[:2], -1, self.head_width) for part in (self.query, self.key, self.value)
        )
        query, key = self._turned(query, places).transpose(1, 2), self._turned(key, places).transpose(1, 2)
        key, value = self._repeated(key), self._repeated(value.transpose(1, 2))
        attend = packed_attention if self.packed else _attention
        mixed = attend(query, key, value).transpose(1, 2).contiguous().view(x.shape)
        out: Tensor = self.out(mixed)
        return out

    def _repeated(self, x: Tensor) -> Tensor:
        batch, groups, length, width = x.shape
        return x.unsqueeze(2).expand(batch, groups, self.heads // groups, length, width).flatten(1, 2)

    def _turned(self, x: Tensor, places: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        at = places.view(1, x.shape[1], 1, -1, 2)
        first = pairs[..., 0] * at[..., 0] - pairs[..., 1] * at[..., 1]
        second = pairs[..., 1] * at[..., 0] + pairs[..., 0] * at[..., 1]
        return torch.stack((first, second), -1).flatten(3).type_as(x)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _again(layer: nn.Module, x: Tensor, places: Tensor) -> Any:
    return checkpoint(layer, x, places, use_reentrant=False)


class TuneDecoder(nn.Module):
    """Llama 3.2 of torchtune, whose head is its embedding: int64 [batch, length] -> logits of each of ``chunks`` parts.

    Layers are compiled one by one. ``checkpointed``: each layer with its checkpoint, attention within its graph.
    """

    places: Tensor

    def __init__(
        self, layers: int, length: int, width: int, inner: int, heads: int, groups: int, vocabulary: int,
        *, chunks: int = 1, checkpointed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.chunks, self.checkpointed = chunks, checkpointed
        self.word, self.norm = nn.Embedding(vocabulary, width), WrittenNorm(width)
        self.layers = nn.ModuleList(
            TuneLayer(width, inner, heads, groups, packed=not checkpointed) for _ in range(layers)
        )
        self.norm.forward = eager(self.norm.forward)  # type: ignore[method-assign]
        self.register_buffer("places", torch.zeros(length, width // heads // 2, 2), persistent=False)

    @regional
    def forward(self, token_ids: Tensor) -> tuple[Tensor, ...]:
        x = functional.embedding(token_ids, self.word.weight)
        for layer in self.layers:
            x = _again(layer, x, self.places) if self.checkpointed else layer(x, self.places)
        parts = self.norm(x).chunk(self.chunks, dim=1)
        return tuple(functional.linear(part, self.word.weight) for part in parts)


@eager
def wide_loss(parts: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Mean cross-entropy of a float32 copy of the logits, in eager mode: the recipe drops the loss that it compiles."""
    return functional.cross_entropy(parts[0].float().flatten(0, 1), targets.flatten())


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="sum")


@regional
def chunked_loss(parts: Sequence[Tensor], targets: Tensor) -> Tensor:
    """The same part by part: the float32 copy of a part is made in its compiled loss."""
    found = parts[0].new_zeros((), dtype=torch.float32)
    for part, wanted in zip(parts, targets.chunk(len(parts), dim=1), strict=True):
        found = found + _summed_loss(part.flatten(0, 1), wanted.flatten())
    return found / targets.numel()


# timm's vision transformers, as torchao's benchmark fine-tunes them.


class TimmBlock(nn.Module):
    """timm's `Block`; ``swiglu``: the gated MLP and the scales of DINOv2."""

    def __init__(self, width: int, heads: int, inner: int, *, swiglu: bool) -> None:
        super().__init__()
        self.heads, self.swiglu = heads, swiglu
        self.before, self.between = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner // 2 if swiglu else inner, width)
        for name in ("first_scale", "second_scale"):
            self.register_parameter(name, nn.Parameter(torch.zeros(width)) if swiglu else None)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._scaled(self._mixed(self.before(x)), "first_scale")
        return x + self._scaled(self._mlp(self.between(x)), "second_scale")

    def _scaled(self, x: Tensor, name: str) -> Tensor:
        return x * self.get_parameter(name) if self.swiglu else x

    def _mixed(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv.unbind(0))
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        if self.swiglu:
            gate, wide = wide.chunk(2, dim=-1)
            wide = functional.silu(gate) * wide
        else:
            wide = functional.gelu(wide)
        out: Tensor = self.down(wide)
        return out


class TimmVit(nn.Module):
    """timm's `VisionTransformer` of pictures of 224 pixels with 45 classes, patches of 14: the head reads the token."""

    def __init__(
        self, layers: int, width: int, heads: int, inner: int, *, swiglu: bool = False, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.patches = nn.Conv2d(3, width, kernel_size=14, stride=14)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 16 * 16 + 1, width))
        self.layers = nn.ModuleList(TimmBlock(width, heads, inner, swiglu=swiglu) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 45)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


# ml-cross-entropy: the loss alone.


class CappedLoss(nn.Module):
    """Cross-entropy of capped logits of embeddings [tokens, width] by a classifier [vocabulary, width]."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.zeros(tokens, width))
        self.classifier = nn.Parameter(torch.zeros(vocabulary, width))

    def forward(self, targets: Tensor) -> Tensor:
        logits = self.embeddings @ self.classifier.T
        logits = torch.tanh(logits / 30.0) * 30.0
        return functional.cross_entropy(logits.float(), targets)
