"""Makes users' text (names, paths, lines of code, messages) safe to print on a terminal, in a log, a file or a page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

__all__ = ["printable", "warn"]

_BLANKS = re.compile(r"\s+")
_COMMAND = re.compile(r"^ *:(?=:)|#(?=#\w*\[)")
"""Beginning of a command to a CI service in a log: `::error::` before a line, `##[error]`, `##vso[...]` anywhere."""
_FORMULA = re.compile(r"^ *[-=+@\uff0b\uff0d\uff1d\uff20](?=.)")
"""Beginning of a formula of a spreadsheet, in ASCII or fullwidth characters."""
_MARKUP: Mapping[str, Mapping[int, str]] = {
    "markdown": str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|~"} | {"&": "&amp;", "<": "&lt;"}),
    "html": str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}),
}


def printable(text: object, place: str = "line") -> str:
    """Return text as one harmless line for a place: a "line", a "csv" field, or a piece of "markdown" or "html".

    A "line" is one of a terminal, log, message or comment of generated code; "html" fits XML and attributes, too.

    Line breaks become blanks. Other unprintable characters (controls, escapes, marks of direction, surrogates) are
    spelled as Python spells them, `\\x1b`; so is the first character of a CI service's command and of a spreadsheet's
    formula. Applied twice it changes nothing more, except for Markdown and HTML.
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
