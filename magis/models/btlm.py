"""BTLM-3B (Dey et al. 2023): decoder with ALiBi, SwiGLU and the maximal-update parametrization (muP)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture.workload import Workload
from magis.models.attention import SelfAttention, alibi_slopes, causal_mask
from magis.models.building import Style, check_divides, check_sizes, init_transformer, seeded, token_loss, tokens


@dataclass(frozen=True)
class BtlmConfig:
    """Sizes of one BTLM and its batch; the defaults are BTLM-3B, which was trained without dropout."""

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
    """Pre-norm decoder layer, [batch, length, width] -> the same; scores times 1 / head width (muP)."""

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
    """Token numbers, int64 [batch, length] -> next-token logits [batch, length, vocabulary]; the head is
    tied.

    The seed's variant masks causally but has no ALiBi, and keeps SwiGLU.
    """

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
        x = self.word(token_ids) * self.embedding_scale
        for layer in self.layers:
            x = layer(x, self.mask)
        return functional.linear(self.norm(x) * self.output_scale, self.word.weight)


def alibi_bias(heads: int, length: int) -> Tensor:
    """What ALiBi adds to the scores: minus slope x distance, [1, heads, length, length].

    The fused kernels take masks of two or four dimensions; others fall back to attention written out.
    """
    position = torch.arange(length)
    distance = (position[:, None] - position[None, :]).abs()
    return torch.tensor(alibi_slopes(heads))[None, :, None, None] * -distance


def btlm(config: BtlmConfig, style: Style, name: str, seed: int) -> Workload:
    """BTLM with a batch of random tokens."""
    with seeded(seed):
        module = Btlm(config, style)
        text, following = tokens(config.batch_size, config.seq_len, config.vocab_size)
    return Workload(
        name=name,
        module=module,
        inputs=(text,),
        targets=(following,),
        loss_fn=token_loss,
        optimizer=style.optimizer,
        blocks=tuple(f"layers.{i}" for i in range(config.layers)),
        explicit_attention=style.explicit_attention,
    )
