"""Readers of numbers, words and lists that a user wrote. They raise UsageError for anything else.

Messages begin with `shown`, the place where it was written: an option's flag, or an argument of a mark.
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
"""Budgets by name, in plans evaluated; None: the search's own (docs/ci.md compares them)."""
MOST_DIGITS = 18
"""Most digits of a whole number: a larger one is a slip of the hand, and no machine word."""


@dataclass(frozen=True)
class Shard:
    """One of `count` shares of the models; `number` is 1, 2, ..."""

    number: int
    count: int

    @classmethod
    def read(cls, shown: str, text: str) -> Self:
        """Read a shard such as "1/4"."""
        if re.fullmatch(r"[1-9][0-9]{0,5}/[1-9][0-9]{0,5}", text):
            number, count = map(int, text.split("/"))
            if number <= count:
                return cls(number, count)
        raise UsageError(f"{shown}: {text!r} is not one such as 1/4 (the first of four)")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, names: Iterable[str]) -> frozenset[str]:
        """Return this share's names; together the shares have each name once.

        Names are dealt out in sorted order, so that their given order and repeats change nothing.
        """
        return frozenset(sorted(set(names))[self.number - 1 :: self.count])


def items(shown: str, given: Sequence[str]) -> tuple[str, ...]:
    """Split at commas; each part once, in the order written, none of them empty."""
    parts = [part.strip() for text in given for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{shown}: empty item in {','.join(given)!r}")
    return tuple(dict.fromkeys(parts))


def _read_number(shown: str, text: str, wanted: str, accept: Callable[[float], bool]) -> float:
    """Read a finite number that `accept` accepts; `wanted` describes those in words."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or not accept(found):
        raise UsageError(f"{shown}: {text!r} is not {wanted}")
    return found


def whole(shown: str, text: str, *, least: int) -> int:
    """Read a whole number that is at least `least`."""
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and int(text) >= least):
        raise UsageError(f"{shown}: {text!r} is not a whole number that is at least {least}")
    return int(text)


def share(shown: str, text: str) -> float:
    """Read a tolerance; 0 or more."""
    return _read_number(shown, text, "a share such as 0.05 (it must not be negative)", lambda x: x >= 0)


def memory_ratios_of(shown: str, given: Sequence[str]) -> tuple[float, ...]:
    """Read memory limits as shares of the original's peak, each once."""
    return _read_numbers(shown, given, "a number above 0 and at most 1", lambda x: 0 < x <= 1)


def latency_ratios_of(shown: str, given: Sequence[str]) -> tuple[float, ...]:
    """Read latency limits as multiples of the original's latency, each once."""
    return _read_numbers(shown, given, "a number that is at least 1", lambda x: x >= 1)


def _read_numbers(shown: str, given: Sequence[str], wanted: str, accept: Callable[[float], bool]) -> tuple[float, ...]:
    return tuple(dict.fromkeys(_read_number(shown, item, wanted, accept) for item in items(shown, given)))


def budget(shown: str, text: str) -> int | None:
    """Read a budget by its name, or in plans."""
    return BUDGETS[text] if text in BUDGETS else whole(shown, text, least=1)


def _budget_or_names(shown: str, text: str) -> int | None:
    try:
        return budget(shown, text)
    except UsageError as error:
        raise UsageError(str(error), hint=f"or name one: {', '.join(BUDGETS)}") from None


def choice(shown: str, what: str, text: str, known: Sequence[str]) -> str:
    """Check that a word is one of the known ones."""
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
    "seconds": lambda shown, text: _read_number(shown, text, "a number of seconds above 0", lambda x: x > 0),
    "seed": lambda shown, text: whole(shown, text, least=0),
    "shard": Shard.read,
    "slack": lambda shown, text: _read_number(
        shown, text, f"a share from 0 (none) to {Case.MOST_SLACK}", lambda x: 0 <= x <= Case.MOST_SLACK
    ),
    "strict": _flag,
}
"""Readers of options that are no lists, by the option's name."""
