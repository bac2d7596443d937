"""Strategies: ways to run a training step that users compare with magis, on one or several ranks.

Names are imported on first use: `magis.strategies.distributed_names` parses names without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magis.strategies.distributed_names import DISTRIBUTED, check_world, distributed_strategy
    from magis.strategies.rank_step import RankStep, RankStrategy, World, batch_size, share_of_batch

__all__ = [
    "DISTRIBUTED",
    "RankStep",
    "RankStrategy",
    "World",
    "batch_size",
    "check_world",
    "distributed_strategy",
    "share_of_batch",
]

_NAMES = ("DISTRIBUTED", "check_world", "distributed_strategy")
_BY_NAME, _TYPES = "magis.strategies.distributed_names", "magis.strategies.rank_step"


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use; raise AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_BY_NAME if name in _NAMES else _TYPES), name)
