"""The networks: ordinary `torch.nn` modules with synthetic batches, losses and optimizers, each under a name.

Every network exists twice: the `real` one, as a user would recognise it, and a `seed-` one that leaves out what
the seed of this project leaves out (see `building.Style`). Importing this package imports no torch: that happens
when a network is built, or when `Workload` or `OptimizerSpec` is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from magis.models.registry import (
    GATE_NAMES,
    PRESETS,
    SEED_NAMES,
    ModelSpec,
    UnknownModelError,
    all_names,
    from_factory,
    from_function,
    get,
    resolve,
)

if TYPE_CHECKING:
    from magis.capture.workload import Workload
    from magis.ops.optimizers import OptimizerSpec

__all__ = [
    "GATE_NAMES",
    "PRESETS",
    "SEED_NAMES",
    "ModelSpec",
    "OptimizerSpec",
    "UnknownModelError",
    "Workload",
    "all_names",
    "from_factory",
    "from_function",
    "get",
    "resolve",
]


def __getattr__(name: str) -> object:
    """Load the two types that need torch on first use; AttributeError for any other name."""
    if name not in ("OptimizerSpec", "Workload"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("magis.capture"), name)
