"""Shared parts of the commands: numbers read from options, the path of factories, lines printed."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from magis.errors import UsageError
from magis.printable import printable


def look_here() -> None:
    """Import factories from the working directory, too, as `python -m` does."""
    sys.path.insert(0, str(Path.cwd()))


def tell(text: str) -> None:
    """Print a line of progress or an error to stderr."""
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def show(text: str) -> None:
    """Print a line of the answer to stdout."""
    print(printable(text))  # noqa: T201


def whole_number(flag: str, text: str | None) -> int | None:
    """Read an option's whole number; None without one. Raises UsageError for anything but digits."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"{flag}: {text!r} is not a whole number")
    return int(text)


def real_number(flag: str, text: str | None) -> float | None:
    """Read an option's number; None without one. Raises UsageError for anything else."""
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a number") from None


def above_zero(flag: str, text: str | None, *, whole: bool = False) -> float | None:
    """Read an option's number above 0 and below a million; None without one. Raises UsageError for any other text."""
    if text is None:
        return None
    found = _or_nan(text)
    if not 0 < found < 1e6 or (whole and found != int(found)):
        raise UsageError(f"{flag}: {text!r} is not a {'whole ' if whole else ''}number above 0 and below a million")
    return found


def share(flag: str, text: str) -> float:
    """Read an option's share, at least 0 and below 100. Raises UsageError for any other text."""
    found = _or_nan(text)
    if not 0 <= found < 100:
        raise UsageError(f"{flag}: {text!r} is not a share such as 0.01")
    return found


def _or_nan(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
