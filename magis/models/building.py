"""What the networks share: size checks, seeds, batches, losses, initial weights, and the seed's style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture.workload import Workload
from magis.errors import UsageError
from magis.ops.optimizers import OptimizerSpec


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


# Checks of the sizes that a network is asked for, before anything is built.

T = TypeVar("T")


class SizeError(UsageError):
    """A network cannot be built at the sizes asked for."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


def check_sizes(model: str, config: _Dataclass) -> None:
    """Raise SizeError unless every field of `config` that holds a size is a whole number of at least 1.

    Sizes are the fields annotated `int` or `tuple[int, ...]`.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type == "int":
            _check_one(model, field.name, value)
        elif field.type == "tuple[int, ...]":
            if not isinstance(value, tuple) or not value:
                raise SizeError(f"{model}: {field.name} must be a tuple of whole numbers, not {value!r}")
            for item in value:
                _check_one(model, field.name, item)


def _check_one(model: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SizeError(f"{model}: {name} must be a whole number of at least 1, not {value!r}")


def check_divides(model: str, what: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise SizeError unless `divisor` divides `value`."""
    if value % divisor:
        raise SizeError(f"{model}: {what} must be a multiple of {divisor_name} = {divisor}, not {value}")


def choose(model: str, what: str, table: Mapping[str, T], key: object) -> T:
    """`table[key]`; raises SizeError that lists the choices."""
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
    """Makes the layers of one variant; `seed` chooses the column of the table above.

    `written_out`: attention as the seed's has it, the rest as it is: as networks were written before fused kernels.
    """

    seed: bool
    written_out: bool = False

    @property
    def optimizer(self) -> OptimizerSpec:
        return OptimizerSpec("sgd", lr=1e-3) if self.seed else OptimizerSpec("adamw", lr=1e-4, weight_decay=0.01)

    @property
    def positions(self) -> bool:
        """Whether positions are embedded (learned tables, ALiBi)."""
        return not self.seed

    @property
    def explicit_attention(self) -> bool:
        return self.seed or self.written_out

    def bias(self, wanted: bool = True) -> bool:
        """Whether a layer has a bias, given whether the original one has."""
        return wanted and not self.seed

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
        """Linear layer [..., inputs] -> [..., outputs]."""
        return nn.Linear(inputs, outputs, bias=self.bias(bias))

    def conv(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
        """Convolution with padding kernel // 2 over [batch, inputs, height, width]."""
        return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=self.bias(bias))

    def batch_norm(self, channels: int) -> nn.Module:
        return nn.Identity() if self.seed else nn.BatchNorm2d(channels)

    def layer_norm(self, width: int, eps: float = 1e-5) -> nn.LayerNorm:
        return nn.LayerNorm(width, eps=eps, elementwise_affine=not self.seed)

    def relu(self) -> nn.ReLU:
        """In place in the real networks, as their originals have it; a fresh tensor in the seed's."""
        return nn.ReLU(inplace=not self.seed)

    def gelu(self, approximate: str = "none") -> nn.Module:
        return nn.ReLU() if self.seed else nn.GELU(approximate=approximate)

    def dropout(self, probability: float) -> nn.Module:
        return nn.Identity() if self.seed or probability == 0 else nn.Dropout(probability)


REAL = Style(seed=False)
SEED = Style(seed=True)
WRITTEN_OUT = Style(seed=False, written_out=True)


# Training steps of networks that differ in the network alone.


class _Images(Protocol):
    @property
    def batch_size(self) -> int: ...
    @property
    def image_size(self) -> int: ...
    @property
    def classes(self) -> int: ...


class _Text(Protocol):
    @property
    def batch_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layers(self) -> int: ...


Images = TypeVar("Images", bound=_Images)
Text = TypeVar("Text", bound=_Text)


def image_classifier(
    make: Callable[[Images, Style], nn.Module],
    config: Images,
    style: Style,
    name: str,
    seed: int,
    blocks: Iterable[str],
) -> Workload:
    """A network with a batch of noise images and random classes; `blocks` are names of its modules."""
    with seeded(seed):
        module = make(config, style)
        inputs = (images(config.batch_size, config.image_size),)
        targets = (labels(config.classes, config.batch_size),)
    return Workload(
        name=name,
        module=module,
        inputs=inputs,
        targets=targets,
        loss_fn=image_loss,
        optimizer=style.optimizer,
        blocks=tuple(blocks),
        explicit_attention=style.explicit_attention,
    )


def language_model(
    make: Callable[[Text, Style], nn.Module],
    config: Text,
    style: Style,
    name: str,
    seed: int,
    optimizer: OptimizerSpec | None = None,
) -> Workload:
    """A decoder with a batch of random tokens; its `layers` are the blocks. None: the style's optimizer."""
    with seeded(seed):
        module = make(config, style)
        text, following = tokens(config.batch_size, config.seq_len, config.vocab_size)
    return Workload(
        name=name,
        module=module,
        inputs=(text,),
        targets=(following,),
        loss_fn=token_loss,
        optimizer=optimizer or style.optimizer,
        blocks=tuple(f"layers.{i}" for i in range(config.layers)),
        explicit_attention=style.explicit_attention,
    )
