"""Small things that several kinds of cases need: statistics of timings, and what is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Made = TypeVar("_Made")

__all__ = ["Memo", "median"]


def median(times: Sequence[float] | None) -> tuple[float | None, float | None]:
    """Median and half the interquartile range; None of nothing."""
    if not times:
        return None, None
    ordered = sorted(times)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return middle, (ordered[(3 * count) // 4 if count > 1 else 0] - ordered[count // 4]) / 2


class Memo:
    """What one case has made and the next ones use as well."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Any] = {}

    def get(self, key: tuple[object, ...], make: Callable[[], _Made]) -> _Made:
        """What ``make`` has made under this key, called the first time only."""
        if key not in self._made:
            self._made[key] = make()
        found: _Made = self._made[key]
        return found
