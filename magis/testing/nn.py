"""The seed's networks, by the seed's names: `G, y = nn.bert("large", batch_size=64)`.

Each builder checks its sizes at once (SizeError, one line) and returns a description; nothing is built
before it is captured. The networks are the seed variants: no BatchNorm, biases, affine LayerNorm, position
embeddings, dropout or GELU, attention written out, plain weight update. Default sizes are those of the
paper's Table 2 where it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from magis.capture.workload import Workload
from magis.extensions.models import convnets, decoders, encoders
from magis.extensions.models import unet as unets
from magis.extensions.models.building import SEED, Style, choose
from magis.extensions.models.convnets import MlpConfig
from magis.extensions.models.convnets import mlp as make_mlp

C = TypeVar("C")


@dataclass(frozen=True)
class SeedGraph:
    """A network that is not built yet."""

    name: str
    make: Callable[[int], Workload]
    """`make(seed)` builds it, under `FakeTensorMode` or for real."""


@dataclass(frozen=True)
class SeedOutput:
    """The network's output, the `y` of the seed's `G, y = ...`: which network and what it returns."""

    graph: str
    what: str


Built = tuple[SeedGraph, SeedOutput]


class Pictures(Protocol):
    """A builder of a network that reads pictures."""

    def __call__(self, batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built: ...


class GrowingPictures(Protocol):
    """A builder of a network that reads pictures and whose layers add channels."""

    def __call__(self, batch_size: int = 64, image_size: int = 224, growth: int = 32) -> Built: ...


def _resnet(name: str, text: str) -> Pictures:
    def build(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
        config = convnets.ResNetConfig(batch_size, image_size, *convnets.RESNETS[name], width)
        return _describe(name, convnets.resnet, config, "class logits")

    build.__name__ = name
    build.__doc__ = f"Describe {text} over [batch_size, 3, image_size, image_size]; `width` channels in the stem."
    return build


def _vgg(name: str, text: str) -> Pictures:
    def build(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
        config = convnets.VggConfig(batch_size, image_size, convnets.VGGS[name], width)
        return _describe(name, convnets.vgg, config, "class logits")

    build.__name__ = name
    build.__doc__ = (
        f"Describe {text} over [batch_size, 3, image_size, image_size]; `width` channels in the first stage."
    )
    return build


def _densenet(name: str, text: str) -> GrowingPictures:
    def build(batch_size: int = 64, image_size: int = 224, growth: int = 32) -> Built:
        config = convnets.DenseNetConfig(batch_size, image_size, convnets.DENSENETS[name], growth)
        return _describe(name, convnets.densenet, config, "class logits")

    build.__name__ = name
    build.__doc__ = f"Describe {text} over [batch_size, 3, image_size, image_size]; each layer adds `growth` channels."
    return build


def _describe(name: str, make: Callable[[C, Style, str, int], Workload], config: C, what: str) -> Built:
    graph = SeedGraph(name=name, make=partial(make, config, SEED, f"seed-{name}"))
    return graph, SeedOutput(graph=name, what=what)


resnet34 = _resnet("resnet34", "ResNet-34")
resnet50 = _resnet("resnet50", "ResNet-50")
resnet101 = _resnet("resnet101", "ResNet-101")
resnet152 = _resnet("resnet152", "ResNet-152")
wide_resnet50_2 = _resnet("wide_resnet50_2", "ResNet-50, with inner convolutions twice as wide,")
wide_resnet101_2 = _resnet("wide_resnet101_2", "ResNet-101, with inner convolutions twice as wide,")
vgg11 = _vgg("vgg11", "VGG-11")
vgg13 = _vgg("vgg13", "VGG-13")
vgg16 = _vgg("vgg16", "VGG-16")
vgg19 = _vgg("vgg19", "VGG-19")
densenet121 = _densenet("densenet121", "DenseNet-121")
densenet169 = _densenet("densenet169", "DenseNet-169")
densenet201 = _densenet("densenet201", "DenseNet-201")


def mlp(batch_size: int = 16384, inputs: int = 1024, hidden: int = 1024, layers: int = 12) -> Built:
    """Describe a perceptron of `layers` hidden layers over [batch_size, inputs]."""
    return _describe("mlp", make_mlp, MlpConfig(batch_size, inputs, hidden, layers), "class logits")


def unet(batch_size: int = 32, image_size: int = 256, width: int = 64, levels: int = 4) -> Built:
    """Describe a U-Net over [batch_size, 3, image_size, image_size]; `width` channels at full resolution."""
    config = unets.UNetConfig(batch_size=batch_size, image_size=image_size, width=width, levels=levels)
    return _describe("unet", unets.unet, config, "pixel logits")


def unetpp(batch_size: int = 16, image_size: int = 256, width: int = 32, levels: int = 4) -> Built:
    """Describe a U-Net++ over [batch_size, 3, image_size, image_size]; `width` channels at full resolution."""
    config = unets.UNetPlusPlusConfig(batch_size=batch_size, image_size=image_size, width=width, levels=levels)
    return _describe("unetpp", unets.unetpp, config, "pixel logits")


def bert(size: str = "base", batch_size: int = 32, seq_len: int = 512, vocab_size: int = 30522) -> Built:
    """Describe a BERT "tiny", "mini", "small", "medium", "base" or "large" over [batch_size, seq_len] tokens."""
    layers, width, heads = choose("bert", "size", encoders.BERT_SIZES, size)
    # the seed's net has no position table that would bound the length
    config = encoders.BertConfig(batch_size, seq_len, layers, width, heads, vocab_size, max_positions=seq_len)
    return _describe(f"bert-{size}", encoders.bert, config, "token logits, sentence logits")


def vit(size: str = "base-16", batch_size: int = 64, image_size: int = 224, classes: int = 1000) -> Built:
    """Describe a ViT of a size out of `VIT_SIZES` ("base-16": 16-pixel patches) over [batch_size, 3, image_size,
    ...]."""
    layers, width, inner, heads, patch = choose("vit", "size", encoders.VIT_SIZES, size)
    config = encoders.VitConfig(batch_size, image_size, patch, layers, width, inner, heads, classes)
    return _describe(f"vit-{size}", encoders.vit, config, "class logits")


def gpt(
    batch_size: int = 4,
    seq_len: int = 1024,
    layers: int = 24,
    width: int = 2048,
    heads: int = 32,
    vocab_size: int = 50304,
) -> Built:
    """Describe a GPT-2-like decoder over [batch_size, seq_len] tokens; the defaults have 1.3 billion parameters."""
    config = decoders.GptConfig(batch_size, seq_len, layers, width, heads, vocab_size, max_positions=seq_len)
    return _describe("gpt", decoders.gpt, config, "token logits")


def gpt_neo(
    batch_size: int = 32,
    seq_len: int = 512,
    layers: int = 24,
    width: int = 2048,
    heads: int = 16,
    vocab_size: int = 50257,
) -> Built:
    """Describe a GPT-Neo over [batch_size, seq_len] tokens; the defaults are GPT-Neo-1.3B."""
    config = decoders.GptNeoConfig(
        batch_size, seq_len, layers, width, heads, vocab_size=vocab_size, max_positions=seq_len
    )
    return _describe("gpt_neo", decoders.gpt_neo, config, "token logits")


def btlm(
    batch_size: int = 32,
    seq_len: int = 512,
    layers: int = 32,
    width: int = 2560,
    heads: int = 32,
    inner: int = 6826,
    vocab_size: int = 50257,
) -> Built:
    """Describe a BTLM over [batch_size, seq_len] tokens, `inner` wide in its feed-forward. The defaults: BTLM-3B."""
    config = decoders.BtlmConfig(batch_size, seq_len, layers, width, inner, heads, vocab_size)
    return _describe("btlm", decoders.btlm, config, "token logits")
