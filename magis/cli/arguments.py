"""Helpers of the commands: numbers of options, the import path, output."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from magis.errors import UsageError
from magis.printable import printable


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the options of the step that a command looks at."""
    parser.add_argument("--device", metavar="NAME", help="as --magis-device")
    parser.add_argument("--preset", metavar="NAME", help="as --magis-preset, of registered names")
    parser.add_argument("--dtype", metavar="NAME", help="as --magis-dtype")
    parser.add_argument("--accumulate", metavar="N", default="1", help="micro-batches for one update, each the batch")


def add_room(parser: argparse.ArgumentParser) -> None:
    """Add the options of the memory that a predicted step may use."""
    parser.add_argument("--memory-limit", metavar="BYTES", help="in place of the device's memory: 24GiB, rtx4090")
    parser.add_argument("--allocator", metavar="CONF", help="settings in place of those of PYTORCH_ALLOC_CONF")


def look_here() -> None:
    """Add the working directory to the import path, as `python -m` does, so that factories in it can be imported."""
    sys.path.insert(0, str(Path.cwd()))


def tell(text: str) -> None:
    """Print a line of progress or an error message to stderr."""
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def show(text: str) -> None:
    """Print a line of the result to stdout."""
    print(printable(text))  # noqa: T201


def whole_number(flag: str, text: str | None) -> int | None:
    """Parse an option as an int; None without one. Raises UsageError for anything but digits."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"{flag}: {text!r} is not a whole number")
    return int(text)


def real_number(flag: str, text: str | None) -> float | None:
    """Parse an option as a float; None without one. Raises UsageError for anything else."""
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a number") from None


def above_zero(flag: str, text: str | None, *, whole: bool = False) -> float | None:
    """Parse an option as a number in (0, 1e6); None without one. Raises UsageError for anything else."""
    if text is None:
        return None
    found = _or_nan(text)
    if not 0 < found < 1e6 or (whole and found != int(found)):
        raise UsageError(f"{flag}: {text!r} is not a {'whole ' if whole else ''}number above 0 and below a million")
    return found


def share(flag: str, text: str) -> float:
    """Parse an option as a fraction, at least 0 and below 100. Raises UsageError for anything else."""
    found = _or_nan(text)
    if not 0 <= found < 100:
        raise UsageError(f"{flag}: {text!r} is not a share such as 0.01")
    return found


def _or_nan(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
