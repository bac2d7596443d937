"""What a user wrote for a number, a word or a list, read and checked; `shown` is where it was written.

Messages begin with that: an option's flag, or what a mark and an argument of it are called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from magis.dtypes import DTYPES
from magis.errors import UsageError, nearest
from magis.results import Case
from magis.strategies.strategy_names import LIMITS_OF

PRESETS = ("small", "paper")
CACHES = ("plans", "results", "none")
BUDGETS = {"quick": 3_000, "default": None, "thorough": 300_000}
"""Names of budgets, in plans evaluated; None is what a search does unasked (docs/ci.md says what they win and lose)."""
MOST_DIGITS = 18
"""Of a whole number: anything larger is a slip of the hand, and no machine word."""


@dataclass(frozen=True)
class Shard:
    """The share `number` (1, 2, ...) of `count`."""

    number: int
    count: int

    @classmethod
    def read(cls, shown: str, text: str) -> Self:
        """The shard of "1/4". Raises UsageError for anything else."""
        if re.fullmatch(r"[1-9][0-9]{0,5}/[1-9][0-9]{0,5}", text):
            number, count = map(int, text.split("/"))
            if number <= count:
                return cls(number, count)
        raise UsageError(f"{shown}: {text!r} is not one such as 1/4 (the first of four)")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, names: Iterable[str]) -> frozenset[str]:
        """The names of this share: dealt out one after another in sorted order, so that the order in which they were
        asked for, and repeats, change nothing. Together the shares have every name, each once."""
        return frozenset(sorted(set(names))[self.number - 1 :: self.count])


def items(shown: str, given: Sequence[str]) -> tuple[str, ...]:
    """The parts between commas, each once, in the order written. Raises UsageError for an empty one."""
    parts = [part.strip() for text in given for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{shown}: empty item in {','.join(given)!r}")
    return tuple(dict.fromkeys(parts))


def _number(shown: str, text: str, wanted: str, accept: Callable[[float], bool]) -> float:
    """A finite number that `accept` accepts; `wanted` says in words which those are."""
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
    return _number(shown, text, "a share such as 0.05 (it must not be negative)", lambda x: x >= 0)


def memory_ratios_of(shown: str, given: Sequence[str]) -> tuple[float, ...]:
    """Memory limits as shares of the original's peak, each once."""
    return _numbers(shown, given, "a number above 0 and at most 1", lambda x: 0 < x <= 1)


def latency_ratios_of(shown: str, given: Sequence[str]) -> tuple[float, ...]:
    """Latency limits as multiples of the original's latency, each once."""
    return _numbers(shown, given, "a number that is at least 1", lambda x: x >= 1)


def _numbers(shown: str, given: Sequence[str], wanted: str, accept: Callable[[float], bool]) -> tuple[float, ...]:
    return tuple(dict.fromkeys(_number(shown, item, wanted, accept) for item in items(shown, given)))


def budget(shown: str, text: str) -> int | None:
    """A budget by its name, or in plans. Raises UsageError."""
    return BUDGETS[text] if text in BUDGETS else whole(shown, text, least=1)


def _budget_or_names(shown: str, text: str) -> int | None:
    try:
        return budget(shown, text)
    except UsageError as error:
        raise UsageError(str(error), hint=f"or name one: {', '.join(BUDGETS)}") from None


def choice(shown: str, what: str, text: str, known: Sequence[str]) -> str:
    """One of the words that are known. Raises UsageError."""
    if text not in known:
        raise UsageError(f"{shown}: unknown {what} {text!r}", hint=nearest(text, known))
    return text


def _flag(shown: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"{shown}: {text!r} is neither true nor false")
    return text == "true"


READERS: Mapping[str, Callable[[str, str], Any]] = {
    "accumulate": lambda shown, text: whole(shown, text, least=1),
    "budget": _budget_or_names,
    "cache": lambda shown, text: choice(shown, "cache", text, CACHES),
    "dtype": lambda shown, text: choice(shown, "dtype", text, DTYPES),
    "latency-tolerance": share,
    "memory-limit-of": lambda shown, text: choice(shown, "kind of bytes", text, LIMITS_OF),
    "memory-tolerance": share,
    "preset": lambda shown, text: choice(shown, "preset", text, PRESETS),
    "processes": lambda shown, text: whole(shown, text, least=1),
    "prune": _flag,
    "ranks": lambda shown, text: whole(shown, text, least=1),
    "seconds": lambda shown, text: _number(shown, text, "a number of seconds above 0", lambda x: x > 0),
    "seed": lambda shown, text: whole(shown, text, least=0),
    "shard": Shard.read,
    "slack": lambda shown, text: _number(
        shown, text, f"a share from 0 (none) to {Case.MOST_SLACK}", lambda x: 0 <= x <= Case.MOST_SLACK
    ),
    "strict": _flag,
}
"""Of options that are no lists, by name."""
