"""Escaping of users' text (names, paths, lines of code, messages) for terminals, logs, files and HTML pages."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

__all__ = ["printable", "warn"]

_BLANKS = re.compile(r"\s+")
_COMMAND = re.compile(r"^ *:(?=:)|#(?=#\w*\[)")
"""Start of a workflow command of a CI service: `::error::` at a line's start, `##[error]`, `##vso[...]` anywhere."""
_FORMULA = re.compile(r"^ *[-=+@\uff0b\uff0d\uff1d\uff20](?=.)")
"""Start of a spreadsheet formula, in ASCII or fullwidth characters."""
_MARKUP: Mapping[str, Mapping[int, str]] = {
    "markdown": str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|~"} | {"&": "&amp;", "<": "&lt;"}),
    "html": str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}),
}


def printable(text: object, place: str = "line") -> str:
    """Return text as one line, escaped for a place: a "line", a "csv" field, or a piece of "markdown" or "html".

    A "line" is one of a terminal, log, message or comment of generated code; "html" is also valid XML and an attribute.

    Line breaks become blanks. Other unprintable characters (controls, escapes, bidirectional marks, surrogates) become
    Python's escapes, `\\x1b`; so does the first character of a CI service's command and of a spreadsheet formula.
    Except for "markdown" and "html", `printable(printable(x)) == printable(x)`.
    """
    line = str(text)
    if not line.isprintable():
        line = _BLANKS.sub(lambda found: found[0] if not found[0].strip(" ") else " ", line)
        line = "".join(char if char.isprintable() else _spelled(char) for char in line)
    line = _COMMAND.sub(_first_spelled, line)
    if place == "csv" and _FORMULA.match(line) and not _is_number(line):
        line = _FORMULA.sub(_first_spelled, line)
    return line.translate(_MARKUP.get(place, {}))


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Emit a warning whose text is one escaped line; all warnings of the project are emitted here."""
    warnings.warn(printable(text), category, stacklevel=stacklevel + 1)


def _first_spelled(found: re.Match[str]) -> str:
    return f"{found[0][:-1]}{_spelled(found[0][-1])}"


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
