"""Kinds of values that a user may write, each with its reader; loads nothing, since every session declares options.

Messages begin with `shown`, the place where it was written: an option's flag, or an argument of a mark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, Self

PRESETS = ("small", "paper")
CACHES = ("plans", "results", "none")
PERMISSIONS = ("new", "moved", "better", "worse")
"""Kinds of findings that --magis-update can accept."""
BUDGETS = {"quick": 3_000, "default": None, "thorough": 300_000}
"""Budgets by name, in plans evaluated; None: the search's own (docs/ci.md compares them)."""
MOST_DIGITS = 18
"""Most digits of a whole number: a larger one is a slip of the hand, and no machine word."""


def refusal(text: str, hint: str = "") -> Exception:
    """Make the UsageError that refuses a value."""
    from magis.errors import UsageError

    return UsageError(text, hint=hint)


class Kind(NamedTuple):
    """A kind of value: how help calls it, and its reader. That of a list takes texts of which each may hold commas."""

    metavar: str
    """Empty: on the command line the option takes no value, which is then "true"."""
    read: Callable[[str, Any], Any]
    is_list: bool = False
    words: tuple[str, ...] | str = ()
    """All words that it takes, if it takes words alone; "module:object" where the words are defined."""

    def value(self, shown: str, texts: Sequence[str]) -> Any:
        """Read what was written. Raises UsageError."""
        if self.is_list:
            return self.read(shown, items(shown, texts))
        if not texts[0].strip():
            raise refusal(f"{shown} is empty")
        return self.read(shown, texts[0].strip())

    def all_words(self) -> tuple[str, ...]:
        """Return `words`, loaded if need be."""
        return resolve_name(self.words) if isinstance(self.words, str) else self.words


def items(shown: str, given: Sequence[str]) -> tuple[str, ...]:
    """Split at commas; each part once, in the order written, none of them empty."""
    parts = [part.strip() for text in given for part in text.split(",")]
    if not all(parts):
        raise refusal(f"{shown}: empty item in {','.join(given)!r}")
    return tuple(dict.fromkeys(parts))


def one_of(what: str, words: tuple[str, ...] | str, metavar: str = "NAME", *, is_list: bool = False) -> Kind:
    """Make the kind of values that are known words, called `what`; for a list, several of them."""

    def read(shown: str, given: Any) -> Any:
        from magis.errors import nearest

        known = kind.all_words()
        for word in given if is_list else (given,):
            if word not in known:
                raise refusal(f"{shown}: unknown {f'{what} {word!r}'.strip()}", nearest(word, known))
        return given

    kind = Kind(metavar, read, is_list, words)
    return kind


def number(metavar: str, wanted: str, accept: Callable[[float], bool], *, is_list: bool = False) -> Kind:
    """Make the kind of finite numbers that `accept` accepts; `wanted` describes them in words."""

    def read_one(shown: str, text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found) or not accept(found):
            raise refusal(f"{shown}: {text!r} is not {wanted}")
        return found

    def read_all(shown: str, texts: Sequence[str]) -> tuple[float, ...]:
        return tuple(dict.fromkeys(read_one(shown, text) for text in texts))

    return Kind(metavar, read_all if is_list else read_one, is_list)


def whole(least: int, hint: str = "") -> Kind:
    """Make the kind of whole numbers that are at least `least`; `hint` follows the refusal of others."""

    def read(shown: str, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and int(text) >= least):
            raise refusal(f"{shown}: {text!r} is not a whole number that is at least {least}", hint)
        return int(text)

    return Kind("N", read)


def _read_budget(shown: str, text: str) -> int | None:
    """Read a budget by its name, or in plans."""
    if text in BUDGETS:
        return BUDGETS[text]
    return int(whole(1, f"or name one: {', '.join(BUDGETS)}").read(shown, text))


def _read_truth(shown: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise refusal(f"{shown}: {text!r} is neither true nor false")
    return text == "true"


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
        raise refusal(f"{shown}: {text!r} is not one such as 1/4 (the first of four)")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, names: Iterable[str]) -> frozenset[str]:
        """Return this share's names; together the shares have each name once.

        Names are dealt out in sorted order, so that their given order and repeats change nothing.
        """
        return frozenset(sorted(set(names))[self.number - 1 :: self.count])


def _as_written(_shown: str, given: Any) -> Any:
    return given


NAMES = Kind("NAMES", _as_written, is_list=True)
FLAG = Kind("", _read_truth, words=("true", "false"))
FILE, DIR = (Kind(metavar, lambda _shown, text: Path(text)) for metavar in ("FILE", "DIR"))
"""Paths as they were written, still to be put below the directory that they start from."""
SHARE = number("SHARE", "a share such as 0.05 (it must not be negative)", lambda x: x >= 0)
MEMORY_RATIOS = number("R,...", "a number above 0 and at most 1", lambda x: 0 < x <= 1, is_list=True)
LATENCY_RATIOS = number("R,...", "a number that is at least 1", lambda x: x >= 1, is_list=True)
SLACK = number("SHARE", "a share from 0 (none) to 0.9", lambda x: 0 <= x <= 0.9)
SECONDS = number("S", "a number of seconds above 0", lambda x: x > 0)
BUDGET = Kind("PLANS", _read_budget, words=(*BUDGETS, "PLANS"))
SHARD = Kind("I/N", Shard.read)


def text(metavar: str) -> Kind:
    """Make the kind of any text."""
    return Kind(metavar, _as_written)
