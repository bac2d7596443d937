"""`torch.compile(model, backend="magis")` and checkpoint policies: plans for a user's own training loop."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magis.extensions.compile.checkpointing.policy import RegionPolicies

__all__ = ["RegionPolicies"]


def __getattr__(name: str) -> object:
    """Import the exported classes, which need torch, on first use. Raises AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("magis.extensions.compile.checkpointing.policy"), name)
