"""Text as HTML: whatever comes from outside (names, paths, lines, commits) is escaped here, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape

__all__ = ["element", "embedded", "table", "text"]

INVISIBLE = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))
"""Control characters, which HTML does not allow in any form."""


def text(words: object) -> str:
    """Plain text, quotes included."""
    return escape(str(words).translate(INVISIBLE), quote=True)


def element(name: str, inner: str, **attributes: object) -> str:
    """An element around HTML that is made already; a trailing "_" of an attribute's name is left out."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return f"<{name}{given}>{inner}</{name}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int], **attributes: object) -> str:
    """A table of cells that are HTML; columns in ``left`` hold words, the others numbers."""
    return element("table", "".join(_table(head, rows, left)), **attributes)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> Iterator[str]:
    kinds = ["w" if column in left else "n" for column in range(len(head))]
    cells = "".join(element("th", text(cell), class_=kind, scope="col") for cell, kind in zip(head, kinds, strict=True))
    yield f"<thead><tr>{cells}</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{''.join(element('td', cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))}</tr>"
    yield "</tbody>"


def embedded(data: object) -> str:
    """JSON for a <script> element: no character of it can end that element or begin a comment."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        plain = plain.replace(mark, f"\\u{ord(mark):04x}")
    return plain
