"""What a user wrote for a number or a list, read and checked; messages begin with `shown`, where it was written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from magis.errors import UsageError

MOST_DIGITS = 18
"""Of a whole number: anything larger is a slip of the hand, and no machine word."""


def items(shown: str, given: Sequence[str]) -> tuple[str, ...]:
    """The parts between commas, each once, in the order written. Raises UsageError for an empty one."""
    parts = [part.strip() for text in given for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{shown}: empty item in {','.join(given)!r}")
    return tuple(dict.fromkeys(parts))


def number(shown: str, text: str, wanted: str, accept: Callable[[float], bool]) -> float:
    """A finite number that `accept` accepts; `wanted` says in words which those are. Raises UsageError."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or not accept(found):
        raise UsageError(f"{shown}: {text!r} is not {wanted}")
    return found


def whole(shown: str, text: str, *, least: int) -> int:
    """A whole number that is at least `least`. Raises UsageError."""
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and int(text) >= least):
        raise UsageError(f"{shown}: {text!r} is not a whole number that is at least {least}")
    return int(text)


def share(shown: str, text: str) -> float:
    """A tolerance. Raises UsageError for a negative one."""
    return number(shown, text, "a share such as 0.05 (it must not be negative)", lambda x: x >= 0)


def memory_ratios_of(shown: str, given: Sequence[str]) -> tuple[float, ...]:
    """Memory limits as shares of the original's peak, each once."""
    return _numbers(shown, given, "a number above 0 and at most 1", lambda x: 0 < x <= 1)


def latency_ratios_of(shown: str, given: Sequence[str]) -> tuple[float, ...]:
    """Latency limits as multiples of the original's latency, each once."""
    return _numbers(shown, given, "a number that is at least 1", lambda x: x >= 1)


def _numbers(shown: str, given: Sequence[str], wanted: str, accept: Callable[[float], bool]) -> tuple[float, ...]:
    return tuple(dict.fromkeys(number(shown, item, wanted, accept) for item in items(shown, given)))
