"""Text of users (names, paths, lines of code, messages) on its way to a reader: a terminal, a log, a file, a page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

__all__ = ["printable", "warn"]

_BLANKS = re.compile(r"\s+")
_COMMAND = re.compile(r"^ *:(?=:)|#(?=#\w*\[)")
"""Begins what a CI service obeys in a log: `::error::` in front of a line; anywhere `##[error]`, `##vso[...]`."""
_FORMULA = re.compile(r"^ *[-=+@\uff0b\uff0d\uff1d\uff20](?=.)")
"""Begins what a spreadsheet computes, in either width."""
_MARKUP: Mapping[str, Mapping[int, str]] = {
    "markdown": str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|~"} | {"&": "&amp;", "<": "&lt;"}),
    "html": str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}),
}


def printable(text: object, place: str = "line") -> str:
    """One line that can only be read, in the form of a place: a "line" of a terminal, a log, a message or a comment of
    generated code, a "csv" field, a piece of "markdown", or of "html" (XML, too), quotes included.

    Line breaks become blanks. All other characters that no reader sees or that move what he sees (controls, escapes,
    marks of direction, halves of characters) are spelled as Python spells them, `\\x1b`; so is the first character of
    what a CI service or a spreadsheet would obey. A second time changes nothing, but for Markdown and HTML.
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
    """Warn in one such line, whatever names of users it holds; all warnings of the project go through this."""
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
