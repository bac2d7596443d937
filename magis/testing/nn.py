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
from typing import TypeVar

from magis.capture.workload import Workload
from magis.models.building import SEED, Style, choose
from magis.models.convnets import DENSENETS, RESNETS, VGGS, DenseNetConfig, MlpConfig, ResNetConfig, VggConfig
from magis.models.convnets import densenet as make_densenet
from magis.models.convnets import mlp as make_mlp
from magis.models.convnets import resnet as make_resnet
from magis.models.convnets import vgg as make_vgg
from magis.models.decoders import BtlmConfig, GptConfig, GptNeoConfig
from magis.models.decoders import btlm as make_btlm
from magis.models.decoders import gpt as make_gpt
from magis.models.decoders import gpt_neo as make_gpt_neo
from magis.models.encoders import BERT_SIZES, VIT_SIZES, BertConfig, VitConfig
from magis.models.encoders import bert as make_bert
from magis.models.encoders import vit as make_vit
from magis.models.unet import UNetConfig, UNetPlusPlusConfig
from magis.models.unet import unet as make_unet
from magis.models.unet import unetpp as make_unetpp

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


def mlp(batch_size: int = 16384, inputs: int = 1024, hidden: int = 1024, layers: int = 12) -> Built:
    """Perceptron of `layers` hidden layers over [batch_size, inputs]."""
    config = MlpConfig(batch_size=batch_size, inputs=inputs, hidden=hidden, layers=layers)
    return _describe("mlp", make_mlp, config, "class logits")


def resnet34(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """ResNet-34 over [batch_size, 3, image_size, image_size]; `width` channels in the stem."""
    return _resnet("resnet34", batch_size, image_size, width)


def resnet50(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """ResNet-50 over [batch_size, 3, image_size, image_size]; `width` channels in the stem."""
    return _resnet("resnet50", batch_size, image_size, width)


def resnet101(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """ResNet-101 over [batch_size, 3, image_size, image_size]; `width` channels in the stem."""
    return _resnet("resnet101", batch_size, image_size, width)


def resnet152(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """ResNet-152 over [batch_size, 3, image_size, image_size]; `width` channels in the stem."""
    return _resnet("resnet152", batch_size, image_size, width)


def wide_resnet50_2(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """ResNet-50 with inner convolutions twice as wide."""
    return _resnet("wide_resnet50_2", batch_size, image_size, width)


def wide_resnet101_2(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """ResNet-101 with inner convolutions twice as wide."""
    return _resnet("wide_resnet101_2", batch_size, image_size, width)


def vgg11(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """VGG-11 over [batch_size, 3, image_size, image_size]; `width` channels in the first stage."""
    return _vgg("vgg11", batch_size, image_size, width)


def vgg13(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """VGG-13 over [batch_size, 3, image_size, image_size]; `width` channels in the first stage."""
    return _vgg("vgg13", batch_size, image_size, width)


def vgg16(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """VGG-16 over [batch_size, 3, image_size, image_size]; `width` channels in the first stage."""
    return _vgg("vgg16", batch_size, image_size, width)


def vgg19(batch_size: int = 64, image_size: int = 224, width: int = 64) -> Built:
    """VGG-19 over [batch_size, 3, image_size, image_size]; `width` channels in the first stage."""
    return _vgg("vgg19", batch_size, image_size, width)


def densenet121(batch_size: int = 64, image_size: int = 224, growth: int = 32) -> Built:
    """DenseNet-121 over [batch_size, 3, image_size, image_size]; each layer adds `growth` channels."""
    return _densenet("densenet121", batch_size, image_size, growth)


def densenet169(batch_size: int = 64, image_size: int = 224, growth: int = 32) -> Built:
    """DenseNet-169 over [batch_size, 3, image_size, image_size]; each layer adds `growth` channels."""
    return _densenet("densenet169", batch_size, image_size, growth)


def densenet201(batch_size: int = 64, image_size: int = 224, growth: int = 32) -> Built:
    """DenseNet-201 over [batch_size, 3, image_size, image_size]; each layer adds `growth` channels."""
    return _densenet("densenet201", batch_size, image_size, growth)


def unet(batch_size: int = 32, image_size: int = 256, width: int = 64, levels: int = 4) -> Built:
    """U-Net over [batch_size, 3, image_size, image_size]; `width` channels at full resolution."""
    config = UNetConfig(batch_size=batch_size, image_size=image_size, width=width, levels=levels)
    return _describe("unet", make_unet, config, "pixel logits")


def unetpp(batch_size: int = 16, image_size: int = 256, width: int = 32, levels: int = 4) -> Built:
    """U-Net++ over [batch_size, 3, image_size, image_size]; `width` channels at full resolution."""
    config = UNetPlusPlusConfig(batch_size=batch_size, image_size=image_size, width=width, levels=levels)
    return _describe("unetpp", make_unetpp, config, "pixel logits")


def bert(size: str = "base", batch_size: int = 32, seq_len: int = 512, vocab_size: int = 30522) -> Built:
    """BERT "tiny", "mini", "small", "medium", "base" or "large" over [batch_size, seq_len] tokens."""
    layers, width, heads = choose("bert", "size", BERT_SIZES, size)
    config = BertConfig(
        batch_size=batch_size,
        seq_len=seq_len,
        layers=layers,
        width=width,
        heads=heads,
        vocab_size=vocab_size,
        max_positions=seq_len,  # the seed's net has no position table that would bound the length
    )
    return _describe(f"bert-{size}", make_bert, config, "token logits, sentence logits")


def vit(size: str = "base-16", batch_size: int = 64, image_size: int = 224, classes: int = 1000) -> Built:
    """ViT of a size out of `VIT_SIZES` ("base-16": base with 16-pixel patches), [batch_size, 3, image_size, ...]."""
    layers, width, inner, heads, patch = choose("vit", "size", VIT_SIZES, size)
    config = VitConfig(
        batch_size=batch_size,
        image_size=image_size,
        patch_size=patch,
        layers=layers,
        width=width,
        inner=inner,
        heads=heads,
        classes=classes,
    )
    return _describe(f"vit-{size}", make_vit, config, "class logits")


def gpt(
    batch_size: int = 4,
    seq_len: int = 1024,
    layers: int = 24,
    width: int = 2048,
    heads: int = 32,
    vocab_size: int = 50304,
) -> Built:
    """GPT-2-like decoder over [batch_size, seq_len] tokens; the defaults have 1.3 billion parameters."""
    config = GptConfig(
        batch_size=batch_size,
        seq_len=seq_len,
        layers=layers,
        width=width,
        heads=heads,
        vocab_size=vocab_size,
        max_positions=seq_len,
    )
    return _describe("gpt", make_gpt, config, "token logits")


def gpt_neo(
    batch_size: int = 32,
    seq_len: int = 512,
    layers: int = 24,
    width: int = 2048,
    heads: int = 16,
    vocab_size: int = 50257,
) -> Built:
    """GPT-Neo over [batch_size, seq_len] tokens; the defaults are GPT-Neo-1.3B."""
    config = GptNeoConfig(
        batch_size=batch_size,
        seq_len=seq_len,
        layers=layers,
        width=width,
        heads=heads,
        vocab_size=vocab_size,
        max_positions=seq_len,
    )
    return _describe("gpt_neo", make_gpt_neo, config, "token logits")


def btlm(
    batch_size: int = 32,
    seq_len: int = 512,
    layers: int = 32,
    width: int = 2560,
    heads: int = 32,
    inner: int = 6826,
    vocab_size: int = 50257,
) -> Built:
    """BTLM over [batch_size, seq_len] tokens, `inner` wide in its feed-forward; the defaults are BTLM-3B."""
    config = BtlmConfig(
        batch_size=batch_size,
        seq_len=seq_len,
        layers=layers,
        width=width,
        heads=heads,
        inner=inner,
        vocab_size=vocab_size,
    )
    return _describe("btlm", make_btlm, config, "token logits")


def _resnet(name: str, batch_size: int, image_size: int, width: int) -> Built:
    stages, expansion, widening = RESNETS[name]
    config = ResNetConfig(
        batch_size=batch_size,
        image_size=image_size,
        stages=stages,
        expansion=expansion,
        widening=widening,
        width=width,
    )
    return _describe(name, make_resnet, config, "class logits")


def _vgg(name: str, batch_size: int, image_size: int, width: int) -> Built:
    config = VggConfig(batch_size=batch_size, image_size=image_size, stages=VGGS[name], width=width)
    return _describe(name, make_vgg, config, "class logits")


def _densenet(name: str, batch_size: int, image_size: int, growth: int) -> Built:
    config = DenseNetConfig(batch_size=batch_size, image_size=image_size, stages=DENSENETS[name], growth=growth)
    return _describe(name, make_densenet, config, "class logits")


def _describe(name: str, make: Callable[[C, Style, str, int], Workload], config: C, what: str) -> Built:
    graph = SeedGraph(name=name, make=partial(make, config, SEED, f"seed-{name}"))
    return graph, SeedOutput(graph=name, what=what)
