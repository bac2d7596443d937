"""Names of the built-in networks, and their factories. Does not import torch; the first build does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from magis.errors import UsageError
from magis.models.model_specs import PRESETS, ModelSpec, Networks

if TYPE_CHECKING:
    from magis.capture.workload import Workload

GATE_NAMES = ("resnet50", "bert", "vit", "unet", "unetpp", "gpt_neo", "btlm")
"""Workloads of the paper's Table 2, selected by "all"."""

REAL_NAMES = (
    *GATE_NAMES,
    "gpt",
    "mlp",
    "resnet34",
    "resnet101",
    "resnet152",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "densenet121",
    "densenet169",
    "densenet201",
)

SEED_NAMES = tuple(f"seed-{name}" for name in GATE_NAMES)
"""Seed variants of the gate's networks, selected by "seed"."""

# trained in bfloat16 in the paper; all other networks in float32
_BFLOAT16 = ("gpt_neo", "btlm")


def network(name: str) -> ModelSpec:
    """Return the specification of a network by name."""
    plain = name.removeprefix("seed-")
    return ModelSpec(
        name=name,
        variant="real" if plain == name else "seed",
        build=partial(_build, name),
        paper_dtype="bfloat16" if plain in _BFLOAT16 else "float32",
    )


def _build(name: str, preset: str, seed: int) -> Workload:
    from magis.extensions.models.presets import recipe

    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}", hint=f"choose {' or '.join(PRESETS)}")
    return recipe(name, preset)(seed)


NETWORKS = Networks(
    names=(*REAL_NAMES, *(f"seed-{name}" for name in REAL_NAMES)),
    groups={"all": GATE_NAMES, "seed": SEED_NAMES},
    spec=network,
)
