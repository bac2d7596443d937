"""Kinds of option values, each with its parser; imports no heavy module, since every session declares the options.

Error messages begin with `shown`: the flag of an option, or the argument of a mark.
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
"""Kinds of findings that --magis-update accepts."""
BUDGETS = {"quick": 3_000, "default": None, "thorough": 300_000}
"""Search budgets by name, in plans evaluated; None: the search's own default (docs/ci.md compares the budgets)."""
MOST_DIGITS = 18
"""Maximum number of digits of an integer option, so that it fits 64 bits."""


def refusal(text: str, hint: str = "") -> Exception:
    """Create the UsageError for an invalid value."""
    from magis.errors import UsageError

    return UsageError(text, hint=hint)


class Kind(NamedTuple):
    """Kind of value: its metavar for help, and its parser. A list is parsed from texts that may contain commas."""

    metavar: str
    """Placeholder of the value in help; empty for a flag without a value, which is parsed as "true"."""
    read: Callable[[str, Any], Any]
    is_list: bool = False
    words: tuple[str, ...] | str = ()
    """All accepted words, or "module:object" where they are defined; empty if other values are accepted, too."""

    def value(self, shown: str, texts: Sequence[str]) -> Any:
        """Parse the texts given for an option. Raises UsageError."""
        if self.is_list:
            return self.read(shown, items(shown, texts))
        if not texts[0].strip():
            raise refusal(f"{shown} is empty")
        return self.read(shown, texts[0].strip())

    def all_words(self) -> tuple[str, ...]:
        """Return the accepted words, importing the module that defines them if necessary."""
        return resolve_name(self.words) if isinstance(self.words, str) else self.words


def items(shown: str, given: Sequence[str]) -> tuple[str, ...]:
    """Split texts at commas into unique items, in order. Raises UsageError for an empty item."""
    parts = [part.strip() for text in given for part in text.split(",")]
    if not all(parts):
        raise refusal(f"{shown}: empty item in {','.join(given)!r}")
    return tuple(dict.fromkeys(parts))


def one_of(what: str, words: tuple[str, ...] | str, metavar: str = "NAME", *, is_list: bool = False) -> Kind:
    """Create a kind of value that accepts only known words (several for a list); `what` names the word in messages."""

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
    """Create a kind of value for finite numbers that satisfy `accept`; `wanted` describes them in messages."""

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
    """Create a kind of value for integers >= `least`; `hint` is appended to the error message."""

    def read(shown: str, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and int(text) >= least):
            raise refusal(f"{shown}: {text!r} is not a whole number that is at least {least}", hint)
        return int(text)

    return Kind("N", read)


def _read_budget(shown: str, text: str) -> int | None:
    """Parse a budget, given by name or as a number of plans."""
    if text in BUDGETS:
        return BUDGETS[text]
    return int(whole(1, f"or name one: {', '.join(BUDGETS)}").read(shown, text))


def _read_truth(shown: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise refusal(f"{shown}: {text!r} is neither true nor false")
    return text == "true"


@dataclass(frozen=True)
class Shard:
    """One of `count` shards of the models; `number` counts from 1."""

    number: int
    count: int

    @classmethod
    def read(cls, shown: str, text: str) -> Self:
        """Parse a shard such as "1/4"."""
        if re.fullmatch(r"[1-9][0-9]{0,5}/[1-9][0-9]{0,5}", text):
            number, count = map(int, text.split("/"))
            if number <= count:
                return cls(number, count)
        raise refusal(f"{shown}: {text!r} is not one such as 1/4 (the first of four)")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names that belong to this shard; every name belongs to exactly one shard.

        The names are sorted and deduplicated first, so their order does not matter.
        """
        return frozenset(sorted(set(names))[self.number - 1 :: self.count])


def read_bytes(shown: str, text: str) -> int:
    """Parse an amount of memory, 0 included. Raises UsageError."""
    from magis.errors import UsageError
    from magis.units import parse_bytes

    try:
        return parse_bytes(text)
    except UsageError as error:
        raise refusal(f"{shown}: {error}") from None


def _as_written(_shown: str, given: Any) -> Any:
    return given


NAMES = Kind("NAMES", _as_written, is_list=True)
FLAG = Kind("", _read_truth, words=("true", "false"))
FILE, DIR = (Kind(metavar, lambda _shown, text: Path(text)) for metavar in ("FILE", "DIR"))
"""Paths exactly as given, not yet resolved against a base directory."""
SHARE = number("SHARE", "a share such as 0.05 (it must not be negative)", lambda x: x >= 0)
MEMORY_RATIOS = number("R,...", "a number above 0 and at most 1", lambda x: 0 < x <= 1, is_list=True)
LATENCY_RATIOS = number("R,...", "a number that is at least 1", lambda x: x >= 1, is_list=True)
SLACK = number("SHARE", "a share from 0 (none) to 0.9", lambda x: 0 <= x <= 0.9)
SECONDS = number("S", "a number of seconds above 0", lambda x: x > 0)
BYTES = Kind("SIZE", read_bytes)
BUDGET = Kind("PLANS", _read_budget, words=(*BUDGETS, "PLANS"))
SHARD = Kind("I/N", Shard.read)


def text(metavar: str) -> Kind:
    """Create a kind of value for any text."""
    return Kind(metavar, _as_written)
