"""Small statistics of timings."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["median"]


def median(times: Sequence[float] | None) -> tuple[float | None, float | None]:
    """Median and half the interquartile range; None of nothing."""
    if not times:
        return None, None
    ordered = sorted(times)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return middle, (ordered[(3 * count) // 4 if count > 1 else 0] - ordered[count // 4]) / 2
