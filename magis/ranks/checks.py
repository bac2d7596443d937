"""Whether ranks are enough for a technique, before any of them starts."""

from __future__ import annotations

from magis.strategies.names import check_world, technique

__all__ = ["check_ranks"]


def check_ranks(name: str, size: int) -> None:
    """Raise UsageError unless ``size`` ranks hold whole groups of the technique; it names the number needed.

    For a name that is no technique's, too. Loads torch.
    """
    check_world(technique(name), size)
