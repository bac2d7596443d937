"""Sizes of every built-in network at the presets "paper" and "small" (runs on two CPU cores).

Small sizes keep memory ratios meaningful: many activations per weight, no single dominant tensor (so a small
vocabulary), and the original depth if a step still takes at most half a second. `benchmarks/preset_sizes.py` prints the
resulting figures, and a test checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from magis.capture.workload import Workload
from magis.extensions.models.building import REAL, SEED, Style
from magis.extensions.models.convnets import (
    DENSENETS,
    RESNETS,
    VGGS,
    DenseNetConfig,
    MlpConfig,
    ResNetConfig,
    VggConfig,
    densenet,
    mlp,
    resnet,
    vgg,
)
from magis.extensions.models.decoders import BtlmConfig, GptConfig, GptNeoConfig, btlm, gpt, gpt_neo
from magis.extensions.models.encoders import BertConfig, VitConfig, bert, vit
from magis.extensions.models.unet import UNetConfig, UNetPlusPlusConfig, unet, unetpp

Make = Callable[[Style, str, int], Workload]
"""Function (style, name, seed) that builds a network at fixed sizes."""


def recipe(name: str, preset: str) -> Callable[[int], Workload]:
    """Return the factory (seed -> workload) of a network at `preset`, "paper" or "small". Raises KeyError otherwise."""
    plain = name.removeprefix("seed-")
    paper, small = _sizes(plain)
    make = {"paper": paper, "small": small}[preset]
    return partial(make, REAL if plain == name else SEED, name)


def _sizes(plain: str) -> tuple[Make, Make]:
    if plain in RESNETS:
        return _resnet(plain)
    if plain in VGGS:
        convs = VGGS[plain]
        small = VggConfig(batch_size=32, image_size=64, stages=convs, width=8, hidden=64, classes=10)
        return partial(vgg, VggConfig(stages=convs)), partial(vgg, small)
    if plain in DENSENETS:
        stages = DENSENETS[plain]
        tiny = DenseNetConfig(batch_size=16, image_size=64, stages=stages, growth=4, classes=10)
        return partial(densenet, DenseNetConfig(stages=stages)), partial(densenet, tiny)
    return _others()[plain]


def _resnet(plain: str) -> tuple[Make, Make]:
    stages, expansion, widening = RESNETS[plain]
    paper = ResNetConfig(stages=stages, expansion=expansion, widening=widening)
    # the deep and the wide ones are half as wide, to stay within the half second
    small = replace(
        paper,
        batch_size=96 if plain == "resnet34" else 48,
        image_size=96,
        width=16 if plain in ("resnet34", "resnet50") else 8,
        classes=10,
    )
    return partial(resnet, paper), partial(resnet, small)


def _others() -> dict[str, tuple[Make, Make]]:
    small_bert = BertConfig(batch_size=64, seq_len=32, layers=6, width=128, heads=2, vocab_size=512, max_positions=32)
    small_vit = VitConfig(
        batch_size=32, image_size=64, patch_size=8, layers=8, width=96, inner=384, heads=3, classes=10
    )
    small_neo = GptNeoConfig(
        batch_size=32, seq_len=64, layers=6, width=96, heads=3, window=16, vocab_size=512, max_positions=64
    )
    small_gpt = GptConfig(batch_size=16, seq_len=64, layers=6, width=96, heads=3, vocab_size=512, max_positions=64)
    small_btlm = BtlmConfig(
        batch_size=32, seq_len=64, layers=8, width=96, inner=256, heads=3, vocab_size=512, mup_base_width=96
    )
    small_mlp = MlpConfig(batch_size=4096, inputs=128, hidden=128, layers=12, classes=10)
    small_unet = UNetConfig(batch_size=8, image_size=96, width=12)
    small_unetpp = UNetPlusPlusConfig(batch_size=8, image_size=64, width=8)
    return {
        "bert": (partial(bert, BertConfig()), partial(bert, small_bert)),
        "vit": (partial(vit, VitConfig()), partial(vit, small_vit)),
        "gpt_neo": (partial(gpt_neo, GptNeoConfig()), partial(gpt_neo, small_neo)),
        "gpt": (partial(gpt, GptConfig()), partial(gpt, small_gpt)),
        "btlm": (partial(btlm, BtlmConfig()), partial(btlm, small_btlm)),
        "unet": (partial(unet, UNetConfig()), partial(unet, small_unet)),
        "unetpp": (partial(unetpp, UNetPlusPlusConfig()), partial(unetpp, small_unetpp)),
        "mlp": (partial(mlp, MlpConfig()), partial(mlp, small_mlp)),
    }
