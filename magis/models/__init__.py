"""Models by name: networks of neighbours, and users' factories.

Importing this package does not import torch; building a network, `Workload` and `OptimizerSpec` do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from magis.models.model_specs import (
    PRESETS,
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
    "PRESETS",
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
    """Import `OptimizerSpec` or `Workload` on first use; raise AttributeError for any other name."""
    if name not in ("OptimizerSpec", "Workload"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("magis.capture"), name)
