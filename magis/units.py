"""Formatting of bytes, milliseconds and tables; median and spread."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction

from magis.errors import UsageError
from magis.printable import printable

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "aligned",
    "check_whole",
    "format_bytes",
    "format_milliseconds",
    "in_one_word",
    "is_number",
    "median_and_spread",
    "parse_bytes",
    "share_of",
]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("kB", "MB", "GB", "TB", "PB")
_BYTES_PER_UNIT = (
    {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)}
    | {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL, start=1)}
    | {"": 1}
)
_AMOUNT = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*", re.ASCII)


def format_bytes(count: int) -> str:
    """Format a number of bytes: exact below 1 KiB, two decimals in binary units above ("1.50 GiB").

    The unit is the largest one in which the printed number stays below 1024; negative numbers keep their sign.
    """
    if abs(count) < KIB:
        return f"{count} B"
    scaled = float(count)
    for unit in _BINARY[1:]:
        scaled /= 1024
        # compared after rounding, or 1 MiB less one byte would print as "1024.00 KiB"
        if abs(round(scaled, 2)) < 1024 or unit == _BINARY[-1]:
            break
    return f"{scaled:.2f} {unit}"


def in_one_word(count: int) -> str:
    """Format a number of bytes exactly and without blanks, in the largest binary unit that divides it ("1536MiB")."""
    power = next(power for power in reversed(range(len(_BINARY))) if count % 1024**power == 0)
    return f"{count // 1024**power}{_BINARY[power]}"


def parse_bytes(text: str) -> int:
    """Parse "8 GiB", "1.5MiB", "24 GB" (decimal: 24e9) or "4096" as bytes, rounded down; case does not matter.

    Raises UsageError for anything else, including negative amounts and the ambiguous units "G" and "M".
    """
    match = _AMOUNT.fullmatch(text)
    unit = _BYTES_PER_UNIT.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        known = ", ".join(_BINARY + _DECIMAL)
        raise UsageError(f"not an amount of memory: {text!r}", hint=f"write a number and a unit out of {known}")
    return int((Decimal(match["number"]) * unit).to_integral_value(rounding=ROUND_FLOOR))


def format_milliseconds(value: float) -> str:
    """Format milliseconds with about three digits; as seconds from 10 s on."""
    size = abs(value)
    if size >= 10_000:
        return f"{value / 1000:.1f} s"
    if size >= 10:
        return f"{value:.1f} ms"
    return f"{value:.2f} ms" if size >= 1 else f"{value:.3f} ms"


def share_of(ratio: float | None, amount: int) -> int | None:
    """Return ratio * amount in whole units (bytes, nanoseconds), rounded down; None without a ratio.

    The ratio counts as the decimal that was written: 0.8, not the double nearest to 0.8.
    """
    return None if ratio is None else int(Fraction(str(ratio)) * amount)


def check_whole(name: str, value: object, least: int) -> None:
    """Raise UsageError, which names the argument, unless a value is an int of at least `least`, and no bool."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r}", hint=f"give a whole number that is at least {least}")


def is_number(value: object) -> bool:
    """Return True for a finite int or float, but not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> Iterator[str]:
    """Yield the rows of a table as lines: columns as wide as their widest cell, right-aligned except those in
    `left`."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def median_and_spread(times: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return the median of the times and half their interquartile range; (None, None) without times."""
    if not times:
        return None, None
    ordered = sorted(times)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return middle, (ordered[(3 * count) // 4 if count > 1 else 0] - ordered[count // 4]) / 2
