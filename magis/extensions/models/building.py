"""Parts that the networks share: size checks, batches, losses, initialization, the style of a variant, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture.workload import Workload
from magis.errors import UsageError
from magis.models.custom import seeded
from magis.ops.optimizers import OptimizerSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def images(batch: int, size: int) -> Tensor:
    """Return images of normal noise [batch, 3, size, size]."""
    return torch.randn(batch, 3, size, size)


def labels(classes: int, *shape: int) -> Tensor:
    """Return uniformly random class indices, int64, of the given shape."""
    return torch.randint(0, classes, shape)


def image_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of logits [batch, classes, ...] against class indices [batch, ...]."""
    return functional.cross_entropy(logits, target)


def pixel_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of logits [batch, classes, height, width] against class indices [batch, height, width].

    It is computed in float32 for every data type: the number of pixels overflows float16, which makes the mean 0.
    """
    return functional.cross_entropy(logits.float(), target)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy over tokens: logits [batch, length, vocabulary] against [batch, length]."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def init_transformer(module: nn.Module, std: float = 0.02) -> None:
    """Initialize linear layers and embeddings with normal weights of a standard deviation, and zero biases."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def init_convolutions(module: nn.Module, mode: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """Initialize all convolutions with Kaiming-normal weights and zero biases."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(part.weight, mode=mode, nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)


# Checks of the sizes that a network is asked for, before anything is built.

T = TypeVar("T")


class SizeError(UsageError):
    """Error for sizes at which a network cannot be built."""


def check_sizes(model: str, config: DataclassInstance) -> None:
    """Raise SizeError unless every field of `config` annotated `int` or `tuple[int, ...]` holds integers >= 1."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type == "int":
            _check_size(model, field.name, value)
        elif field.type == "tuple[int, ...]":
            if not isinstance(value, tuple) or not value:
                raise SizeError(f"{model}: {field.name} must be a tuple of whole numbers, not {value!r}")
            for item in value:
                _check_size(model, field.name, item)


def _check_size(model: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SizeError(f"{model}: {name} must be a whole number of at least 1, not {value!r}")


def check_divides(model: str, what: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise SizeError unless `divisor` divides `value`."""
    if value % divisor:
        raise SizeError(f"{model}: {what} must be a multiple of {divisor_name} = {divisor}, not {value}")


def choose(model: str, what: str, table: Mapping[str, T], key: object) -> T:
    """Return `table[key]`. Raises SizeError, which lists the choices, for an unknown key."""
    if not isinstance(key, str) or key not in table:
        raise SizeError(f"{model}: unknown {what} {key!r}", hint=f"choose one of {', '.join(table)}")
    return table[key]


# What the seed variant of every network leaves out, in one place: layers are made through a Style.
#
# | | real | seed |
# | --- | --- | --- |
# | BatchNorm, biases, affine LayerNorm, position embeddings, dropout | as in the original network | none |
# | activation of transformers | GELU | ReLU |
# | attention | `F.scaled_dot_product_attention` | matmul, softmax, matmul |
# | weight update | AdamW | plain SGD |


@dataclass(frozen=True)
class Style:
    """Factory of the layers of one variant; `seed` chooses the column of the table above. With `written_out`, attention
    is matmul, softmax, matmul, as before fused kernels, and all other layers are unchanged."""

    seed: bool
    written_out: bool = False

    @property
    def optimizer(self) -> OptimizerSpec:
        return OptimizerSpec("sgd", lr=1e-3) if self.seed else OptimizerSpec("adamw", lr=1e-4, weight_decay=0.01)

    @property
    def positions(self) -> bool:
        """True if positions are encoded (learned embeddings, ALiBi)."""
        return not self.seed

    @property
    def explicit_attention(self) -> bool:
        return self.seed or self.written_out

    def bias(self, wanted: bool = True) -> bool:
        """Return True if a layer has a bias; `wanted` says if the original network has one there."""
        return wanted and not self.seed

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
        """Create a linear layer [..., inputs] -> [..., outputs]."""
        return nn.Linear(inputs, outputs, bias=self.bias(bias))

    def conv(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
        """Create a convolution with padding kernel // 2 over [batch, inputs, height, width]."""
        return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=self.bias(bias))

    def batch_norm(self, channels: int) -> nn.Module:
        return nn.Identity() if self.seed else nn.BatchNorm2d(channels)

    def layer_norm(self, width: int, eps: float = 1e-5) -> nn.LayerNorm:
        return nn.LayerNorm(width, eps=eps, elementwise_affine=not self.seed)

    def relu(self) -> nn.ReLU:
        """Create a ReLU: in-place in the real networks, as in their originals, out-of-place in the seed variants."""
        return nn.ReLU(inplace=not self.seed)

    def gelu(self, approximate: str = "none") -> nn.Module:
        return nn.ReLU() if self.seed else nn.GELU(approximate=approximate)

    def dropout(self, probability: float) -> nn.Module:
        return nn.Identity() if self.seed or probability == 0 else nn.Dropout(probability)


REAL = Style(seed=False)
SEED = Style(seed=True)
WRITTEN_OUT = Style(seed=False, written_out=True)


Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Inputs and targets."""


def image_batch(batch: int, size: int, classes: int) -> Batch:
    """Return noise images with one random class each."""
    return (images(batch, size),), (labels(classes, batch),)


def token_batch(batch: int, length: int, vocabulary: int) -> Batch:
    """Return random token indices and the next tokens as targets, both int64 [batch, length] and contiguous, so that
    the loss needs no shifted copy of the logits."""
    text = torch.randint(0, vocabulary, (batch, length + 1))
    return (text[:, :-1].contiguous(),), (text[:, 1:].contiguous(),)


def training_step(
    name: str,
    style: Style,
    seed: int,
    make: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    loss_fn: Callable[..., Tensor],
    blocks: Iterable[str],
    optimizer: OptimizerSpec | None = None,
) -> Workload:
    """Build a network and then its batch from the seed; `blocks` are module names; default optimizer: the style's."""
    with seeded(seed):
        module = make()
        inputs, targets = batch()
    return Workload(
        name=name,
        module=module,
        inputs=inputs,
        targets=targets,
        loss_fn=loss_fn,
        optimizer=optimizer or style.optimizer,
        blocks=tuple(blocks),
        explicit_attention=style.explicit_attention,
    )


def numbered(group: str, count: int) -> Iterator[str]:
    """Yield the paths of the modules in a module list, such as "layers.0"."""
    return (f"{group}.{number}" for number in range(count))


# Parts that the transformers share.


# Ways to cut layers for tensor parallelism, as Hugging Face's configurations say it.
ATTENTION_PLAN = {
    "layers.*.attention.query": "colwise",
    "layers.*.attention.key": "colwise",
    "layers.*.attention.value": "colwise",
    "layers.*.attention.qkv": "qkv_colwise",
    "layers.*.attention.out": "rowwise",
}
FEED_FORWARD_PLAN = {"layers.*.feed_forward.up": "colwise", "layers.*.feed_forward.down": "rowwise"}
NORM_PLAN = dict.fromkeys(("layers.*.attention_norm", "layers.*.norm", "norm"), "sequence_parallel_gather_output")
"""Norms of a pre-norm network, which keep their part of the sequence and give the whole."""


class SelfAttention(nn.Module):
    """Multi-head self-attention [batch, length, width] -> [batch, length, width].

    With `packed`, one matrix projects query, key and value (ViT, BTLM), else three (BERT, GPT-Neo). `scale` multiplies
    the scores; default: 1/sqrt(head width). `forward` takes an additive mask that broadcasts to [batch, heads, length,
    length]; with `causal` and no mask, the fused kernel masks. The seed variants use matmul, softmax, matmul, and need
    an explicit mask.
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
        heads = (-1, self.head_width)  # of a rank that shares them: its own
        parts = (self.query(x), self.key(x), self.value(x)) if self.qkv is None else self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in parts)
        mixed = self._explicit(q, k, v, mask) if self.explicit else self._fused(q, k, v, mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

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


class PreNormLayer(nn.Module):
    """Pre-norm transformer layer with residual attention and feed-forward network, on [batch, length, width]."""

    def __init__(
        self,
        style: Style,
        attention: SelfAttention,
        feed_forward: FeedForward,
        width: int,
        *,
        dropout: float,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention_norm = style.layer_norm(width, eps=eps)
        self.attention = attention
        self.dropout = style.dropout(dropout)
        self.norm = style.layer_norm(width, eps=eps)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        out: Tensor = x + self.feed_forward(self.norm(x))
        return out


def causal_mask(length: int, window: int | None = None) -> Tensor:
    """Return an additive mask [length, length]: 0 where a token (row) attends to a token (column), else -inf. A token
    attends to itself and the tokens before; with a `window`, only to the nearest `window` tokens."""
    position = torch.arange(length)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(length, length).masked_fill(hidden, -math.inf)


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of each head (Press et al. 2022), a geometric series. If the number of heads is not a power
    of two, every other slope of the next power's series is appended."""
    nearest = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / nearest) for i in range(nearest)]
    return slopes + [2 ** (-4 * (2 * i + 1) / nearest) for i in range(heads - nearest)]
