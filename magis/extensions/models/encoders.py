"""Transformer encoders: BERT for pre-training (Devlin et al. 2019), and the vision transformer (2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture.workload import Workload
from magis.extensions.models.building import (
    ATTENTION_PLAN,
    FEED_FORWARD_PLAN,
    Batch,
    FeedForward,
    PreNormLayer,
    SelfAttention,
    SizeError,
    Style,
    check_divides,
    check_sizes,
    image_batch,
    image_loss,
    init_transformer,
    labels,
    numbered,
    token_loss,
    training_step,
)

BERT_SIZES = {
    # layers, width, heads
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT and its batch; defaults: BERT-base in the paper's Table 2."""

    batch_size: int = 32
    seq_len: int = 512
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab_size: int = 30522
    max_positions: int = 512
    token_types: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_sizes("bert", self)
        check_divides("bert", "width", self.width, "heads", self.heads)
        if self.seq_len > self.max_positions:
            raise SizeError(f"bert: seq_len {self.seq_len} exceeds max_positions {self.max_positions}")


class BertLayer(nn.Module):
    """Post-norm encoder layer on [batch, length, width]."""

    def __init__(self, config: BertConfig, style: Style) -> None:
        super().__init__()
        self.attention = SelfAttention(style, config.width, config.heads, packed=False, dropout=config.dropout)
        self.attention_dropout = style.dropout(config.dropout)
        self.attention_norm = style.layer_norm(config.width, eps=1e-12)
        self.feed_forward = FeedForward(
            style, config.width, 4 * config.width, activation=style.gelu(), dropout=config.dropout
        )
        self.norm = style.layer_norm(config.width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention_dropout(self.attention(x)))
        out: Tensor = self.norm(x + self.feed_forward(x))
        return out


class BertEmbeddings(nn.Module):
    """Normalized sum of word, token-type and position embeddings; the seed variant has no positions."""

    def __init__(self, config: BertConfig, style: Style) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.width)
        self.token_type = nn.Embedding(config.token_types, config.width)
        self.position = nn.Embedding(config.max_positions, config.width) if style.positions else None
        self.norm = style.layer_norm(config.width, eps=1e-12)
        self.dropout = style.dropout(config.dropout)

    def forward(self, token_ids: Tensor, type_ids: Tensor) -> Tensor:
        x = self.word(token_ids) + self.token_type(type_ids)
        if self.position is not None:
            x = x + self.position(torch.arange(token_ids.shape[1], device=token_ids.device))
        out: Tensor = self.dropout(self.norm(x))
        return out


class Bert(nn.Module):
    """BERT: token and type indices, int64 [batch, length] -> token logits [batch, length, vocabulary] and sentence
    logits [batch, 2]. All sequences have full length, so there is no padding mask."""

    _tp_plan: ClassVar[Mapping[str, str]] = (
        ATTENTION_PLAN
        | FEED_FORWARD_PLAN
        | {"embeddings.word": "embedding_rowwise", "transform_norm": "replicated_output", "decoder_bias": "colwise"}
    )
    pp_plan: ClassVar[Mapping[str, tuple[list[str], list[str]]]] = {
        "embeddings": (["token_ids", "type_ids"], ["x"]),
        "layers": (["x"], ["x"]),
        "embeddings.word.weight": (["x"], ["logits"]),
    }

    def __init__(self, config: BertConfig, style: Style) -> None:
        super().__init__()
        self.sp_plan = {
            "embeddings.norm": "sequence_parallel_split_input",
            "layers.*.attention": "gather_input",
            "layers.*.attention_norm": "sequence_parallel",
            "layers.*.feed_forward": "gather_input",
            "layers.*.norm": "sequence_parallel",
            f"layers.{config.layers - 1}": "gather_output",  # the heads read single tokens
        }
        self.embeddings = BertEmbeddings(config, style)
        self.layers = nn.ModuleList(BertLayer(config, style) for _ in range(config.layers))
        self.pooler = style.linear(config.width, config.width)
        self.transform = style.linear(config.width, config.width)
        self.transform_activation = style.gelu()
        self.transform_norm = style.layer_norm(config.width, eps=1e-12)
        self.decoder_bias = nn.Parameter(torch.zeros(config.vocab_size)) if style.bias() else None
        self.next_sentence = style.linear(config.width, 2)
        init_transformer(self)

    def forward(self, token_ids: Tensor, type_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.start(token_ids, type_ids)
        for index in range(len(self.layers)):
            x = self.block(index, x)
        return self.finish(x)

    def start(self, token_ids: Tensor, type_ids: Tensor) -> Tensor:
        out: Tensor = self.embeddings(token_ids, type_ids)
        return out

    def block(self, index: int, x: Tensor) -> Tensor:
        out: Tensor = self.layers[index](x)
        return out

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sentence = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
        x = self.transform_norm(self.transform_activation(self.transform(x)))
        return functional.linear(x, self.embeddings.word.weight, self.decoder_bias), sentence


def pretraining_loss(output: tuple[Tensor, Tensor], token_labels: Tensor, sentence_labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of the token logits at all positions and of the sentence logits."""
    return token_loss(output[0], token_labels) + functional.cross_entropy(output[1], sentence_labels)


def bert(config: BertConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a BERT with a batch of random sentence pairs; the second sentence begins in the middle of the sequence."""
    shape = (config.batch_size, config.seq_len)

    def batch() -> Batch:
        types = (torch.arange(config.seq_len) >= config.seq_len // 2).long().expand(shape).contiguous()
        inputs = (labels(config.vocab_size, *shape), types)
        return inputs, (labels(config.vocab_size, *shape), labels(2, config.batch_size))

    blocks = numbered("layers", config.layers)
    return training_step(name, style, seed, lambda: Bert(config, style), batch, pretraining_loss, blocks)


# Vision transformer (Dosovitskiy et al. 2021), the classifier with a class token.

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
    """Sizes of a ViT and its batch; defaults: ViT-base/16 in the paper's Table 2, without dropout."""

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


def vit_layer(config: VitConfig, style: Style) -> PreNormLayer:
    """Build one encoder layer."""
    attention = SelfAttention(style, config.width, config.heads, packed=True)
    feed_forward = FeedForward(
        style, config.width, config.inner, activation=style.gelu(), dropout=config.dropout, inside=True
    )
    return PreNormLayer(style, attention, feed_forward, config.width, dropout=config.dropout, eps=1e-6)


class Vit(nn.Module):
    """Vision transformer with a class token: images [batch, 3, size, size] -> class logits [batch, classes]."""

    _tp_plan: ClassVar[Mapping[str, str]] = ATTENTION_PLAN | FEED_FORWARD_PLAN
    pp_plan: ClassVar[Mapping[str, tuple[list[str], list[str]]]] = {
        "patches": (["images"], ["x"]),
        "class_token": (["images"], ["x"]),
        "positions": (["images"], ["x"]),
        "layers": (["x"], ["x"]),
    }

    def __init__(self, config: VitConfig, style: Style) -> None:
        super().__init__()
        patch = config.patch_size
        self.patches = nn.Conv2d(3, config.width, patch, stride=patch, bias=style.bias())
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        length = (config.image_size // patch) ** 2 + 1
        self.positions = nn.Parameter(torch.empty(1, length, config.width)) if style.positions else None
        self.dropout = style.dropout(config.dropout)
        self.layers = nn.ModuleList(vit_layer(config, style) for _ in range(config.layers))
        self.norm = style.layer_norm(config.width, eps=1e-6)
        self.head = style.linear(config.width, config.classes)
        init_transformer(self)
        if self.positions is not None:
            nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.start(images)
        for index in range(len(self.layers)):
            x = self.block(index, x)
        return self.finish(x)

    def start(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        if self.positions is not None:
            x = x + self.positions
        out: Tensor = self.dropout(x)
        return out

    def block(self, index: int, x: Tensor) -> Tensor:
        out: Tensor = self.layers[index](x)
        return out

    def finish(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


def vit(config: VitConfig, style: Style, name: str, seed: int) -> Workload:
    """Build a ViT with a batch of noise images and random classes."""
    batch = config.batch_size, config.image_size, config.classes
    blocks = numbered("layers", config.layers)
    return training_step(name, style, seed, lambda: Vit(config, style), lambda: image_batch(*batch), image_loss, blocks)
