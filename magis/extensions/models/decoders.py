"""Transformer decoders: GPT-2-like (2019), GPT-Neo (Black et al. 2021), BTLM-3B (Dey et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture.workload import Workload
from magis.extensions.models.building import (
    ATTENTION_PLAN,
    FEED_FORWARD_PLAN,
    NORM_PLAN,
    FeedForward,
    PreNormLayer,
    SelfAttention,
    SizeError,
    Style,
    alibi_slopes,
    causal_mask,
    check_divides,
    check_sizes,
    choose,
    init_transformer,
    numbered,
    token_batch,
    token_loss,
    training_step,
)
from magis.ops.optimizers import OptimizerSpec

_GELUS = {"tanh": "tanh", "erf": "none"}
"""Argument `approximate` of torch's GELU: GPT-2's tanh approximation, or the exact function."""


@dataclass(frozen=True)
class GptConfig:
    """Sizes of a GPT and its (global) batch; defaults: the 1.3B row in docs/strategies.md."""

    batch_size: int = 4
    seq_len: int = 1024
    layers: int = 24
    width: int = 2048
    heads: int = 32
    vocab_size: int = 50304
    """GPT-2's 50257 tokens, padded to a multiple of 128."""
    max_positions: int = 1024
    dropout: float = 0.1
    gelu: str = "tanh"
    """Kind of GELU, "tanh" or "erf"."""

    def __post_init__(self) -> None:
        check_sizes("gpt", self)
        check_divides("gpt", "width", self.width, "heads", self.heads)
        if self.seq_len > self.max_positions:
            raise SizeError(f"gpt: seq_len {self.seq_len} exceeds max_positions {self.max_positions}")
        choose("gpt", "gelu", _GELUS, self.gelu)


class Decoder(nn.Module):
    """Decoder with tied head: token indices, int64 [batch, length] -> next-token logits [batch, length, vocabulary]."""

    _tp_plan: ClassVar[Mapping[str, str]] = (
        ATTENTION_PLAN | FEED_FORWARD_PLAN | {"word": "embedding_rowwise", "norm": "replicated_output"}
    )
    sp_plan: ClassVar[Mapping[str, str]] = {"dropout": "split_input"} | NORM_PLAN
    pp_plan: ClassVar[Mapping[str, tuple[list[str], list[str]]]] = {
        "word": (["token_ids"], ["x"]),
        "position": (["token_ids"], ["x"]),
        "layers": (["x"], ["x"]),
        "word.weight": (["x"], ["logits"]),
    }

    def __init__(self, config: GptConfig | GptNeoConfig, style: Style, gelu: str, **attention: Any) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.max_positions, config.width) if style.positions else None
        self.dropout = style.dropout(config.dropout)
        self.layers = nn.ModuleList(_layer(config, style, gelu, attention) for _ in range(config.layers))
        self.norm = style.layer_norm(config.width)

    def mask_of(self, layer: int) -> Tensor | None:
        """Return the mask added to a layer's attention scores; None if the fused kernel applies the causal mask."""
        raise NotImplementedError

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.start(token_ids)
        for index in range(len(self.layers)):
            x = self.block(index, x)
        return self.finish(x)

    def start(self, token_ids: Tensor) -> Tensor:
        x = self.word(token_ids)
        if self.position is not None:
            x = x + self.position(torch.arange(token_ids.shape[1], device=token_ids.device))
        out: Tensor = self.dropout(x)
        return out

    def block(self, index: int, x: Tensor) -> Tensor:
        out: Tensor = self.layers[index](x, self.mask_of(index))
        return out

    def finish(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.word.weight)


def _layer(config: GptConfig | GptNeoConfig, style: Style, gelu: str, attention: Mapping[str, Any]) -> PreNormLayer:
    width, dropout = config.width, config.dropout
    mixing = SelfAttention(style, width, config.heads, dropout=dropout, causal=True, **attention)
    inner = FeedForward(style, width, 4 * width, activation=style.gelu(gelu), dropout=dropout)
    return PreNormLayer(style, mixing, inner, width, dropout=dropout)


class Gpt(Decoder):
    """Decoder in which every layer attends to all earlier tokens (GPT-2)."""

    mask: Tensor | None

    def __init__(self, config: GptConfig, style: Style) -> None:
        super().__init__(config, style, _GELUS[config.gelu], packed=True)
        # the fused kernel masks by itself; written out, attention needs the mask
        mask = causal_mask(config.seq_len) if style.explicit_attention else None
        self.register_buffer("mask", mask, persistent=False)
        init_transformer(self)

    def mask_of(self, layer: int) -> Tensor | None:  # noqa: ARG002
        return self.mask


def gpt(config: GptConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a GPT with a batch of random tokens, trained with Adam (the seed variant with SGD)."""
    optimizer = None if style.seed else OptimizerSpec("adam", lr=1e-4)
    return _language_model(Gpt, config, style, name, seed, optimizer)


def _language_model(
    network: Callable[..., nn.Module],
    config: GptConfig | GptNeoConfig | BtlmConfig,
    style: Style,
    name: str,
    seed: int,
    optimizer: OptimizerSpec | None = None,
) -> Workload:
    """Build a decoder with a batch of random tokens; its `layers` are the blocks."""
    batch = config.batch_size, config.seq_len, config.vocab_size
    blocks = numbered("layers", config.layers)
    return training_step(
        name, style, seed, lambda: network(config, style), lambda: token_batch(*batch), token_loss, blocks, optimizer
    )


# GPT-Neo (Black et al. 2021): decoder, alternating between global and local (windowed) attention.


@dataclass(frozen=True)
class GptNeoConfig:
    """Sizes of a GPT-Neo and its batch; defaults: GPT-Neo-1.3B (no dropout)."""

    batch_size: int = 32
    seq_len: int = 512
    layers: int = 24
    width: int = 2048
    heads: int = 16
    window: int = 256
    vocab_size: int = 50257
    max_positions: int = 2048
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes("gpt_neo", self)
        check_divides("gpt_neo", "width", self.width, "heads", self.heads)
        if self.seq_len > self.max_positions:
            raise SizeError(f"gpt_neo: seq_len {self.seq_len} exceeds max_positions {self.max_positions}")


class GptNeo(Decoder):
    """Decoder whose layers alternate between global and windowed causal attention, with unscaled scores (GPT-Neo)."""

    local_mask: Tensor
    global_mask: Tensor | None

    def __init__(self, config: GptNeoConfig, style: Style) -> None:
        super().__init__(config, style, "tanh", packed=False, bias=False, scale=1.0)
        self.register_buffer("local_mask", causal_mask(config.seq_len, config.window), persistent=False)
        # the fused kernel masks global attention by itself; written out, it needs the mask
        full = causal_mask(config.seq_len) if style.explicit_attention else None
        self.register_buffer("global_mask", full, persistent=False)
        init_transformer(self)

    def mask_of(self, layer: int) -> Tensor | None:
        return self.global_mask if layer % 2 == 0 else self.local_mask


def gpt_neo(config: GptNeoConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a GPT-Neo with a batch of random tokens."""
    return _language_model(GptNeo, config, style, name, seed)


# BTLM-3B (Dey et al. 2023): decoder with ALiBi, SwiGLU and the maximal-update parametrization (muP).


@dataclass(frozen=True)
class BtlmConfig:
    """Sizes of a BTLM and its batch; defaults: BTLM-3B, which was trained without dropout."""

    batch_size: int = 32
    seq_len: int = 512
    layers: int = 32
    width: int = 2560
    inner: int = 6826
    heads: int = 32
    vocab_size: int = 50257
    mup_base_width: int = 256
    embedding_scale: float = 14.6
    output_scale: float = 2.22

    def __post_init__(self) -> None:
        check_sizes("btlm", self)
        check_divides("btlm", "width", self.width, "heads", self.heads)


class BtlmLayer(nn.Module):
    """Pre-norm decoder layer with SwiGLU on [batch, length, width]; scores are scaled by 1 / head width (muP)."""

    def __init__(self, config: BtlmConfig, style: Style) -> None:
        super().__init__()
        self.attention_norm = style.layer_norm(config.width)
        self.attention = SelfAttention(
            style, config.width, config.heads, packed=True, scale=config.heads / config.width, causal=True
        )
        self.norm = style.layer_norm(config.width)
        self.up = style.linear(config.width, config.inner)
        self.gate = style.linear(config.width, config.inner)
        self.down = style.linear(config.inner, config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        y = self.norm(x)
        out: Tensor = x + self.down(self.up(y) * functional.silu(self.gate(y)))
        return out


class Btlm(nn.Module):
    """BTLM decoder with tied head: token indices, int64 [batch, length] -> next-token logits [batch, length,
    vocabulary]. The seed variant has a causal mask without ALiBi, and keeps SwiGLU."""

    _tp_plan: ClassVar[Mapping[str, str]] = ATTENTION_PLAN | {
        "layers.*.up": "colwise",
        "layers.*.gate": "colwise",
        "layers.*.down": "rowwise",
        "word": "embedding_rowwise",
        "norm": "replicated_output",
    }
    sp_plan: ClassVar[Mapping[str, str]] = {"layers.0": "split_input"} | NORM_PLAN
    pp_plan: ClassVar[Mapping[str, tuple[list[str], list[str]]]] = {
        "word": (["token_ids"], ["x"]),
        "layers": (["x"], ["x"]),
        "word.weight": (["x"], ["logits"]),
    }
    mask: Tensor

    def __init__(self, config: BtlmConfig, style: Style) -> None:
        super().__init__()
        self.embedding_scale = config.embedding_scale
        # applied to the hidden states, not to the logits, which are vocabulary / width times as large
        self.output_scale = config.output_scale * config.mup_base_width / config.width
        self.word = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(BtlmLayer(config, style) for _ in range(config.layers))
        self.norm = style.layer_norm(config.width)
        mask = causal_mask(config.seq_len)
        if style.positions:
            mask = mask + alibi_bias(config.heads, config.seq_len)
        self.register_buffer("mask", mask, persistent=False)
        init_transformer(self)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.start(token_ids)
        for index in range(len(self.layers)):
            x = self.block(index, x)
        return self.finish(x)

    def start(self, token_ids: Tensor) -> Tensor:
        out: Tensor = self.word(token_ids) * self.embedding_scale
        return out

    def block(self, index: int, x: Tensor) -> Tensor:
        out: Tensor = self.layers[index](x, self.mask)
        return out

    def finish(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x) * self.output_scale, self.word.weight)


def alibi_bias(heads: int, length: int) -> Tensor:
    """Return ALiBi's bias of attention scores, -slope x distance, [1, heads, length, length]. Fused kernels need a mask
    of two or four dimensions, and fall back to unfused attention for others."""
    position = torch.arange(length)
    distance = (position[:, None] - position[None, :]).abs()
    return torch.tensor(alibi_slopes(heads))[None, :, None, None] * -distance


def btlm(config: BtlmConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a BTLM with a batch of random tokens."""
    return _language_model(Btlm, config, style, name, seed)
