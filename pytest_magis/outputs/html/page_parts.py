"""Parts of the HTML page: escaped text, curves of memory over time, what a baseline file held before."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from magis.errors import BaselineError
from magis.results import Span
from magis.units import format_bytes, format_milliseconds
from pytest_magis.baseline_files import LARGEST_FILE, parse
from pytest_magis.baselines import ModelBaseline
from pytest_magis.options import Settings
from pytest_magis.run_plan import Outcome

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


WIDTH, HEIGHT = 900, 300
LEFT, RIGHT, TOP, BOTTOM = 84, 12, 14, 30
TICKS = 4
Line = tuple[str, Sequence[Span]]
"""A step's name, and its calls."""


def curve_data(lines: Sequence[Line]) -> dict[str, Any]:
    """Names of calls once, and of each line [start, milliseconds, bytes, name]; with the picture's scales."""
    names: dict[str, int] = {}
    end, most = _extent(lines)
    found = {
        name: [
            [round(span.start_ms, 6), round(span.ms, 6), span.nbytes, names.setdefault(_said(span), len(names))]
            for span in _by_start(spans)
        ]
        for name, spans in lines
    }
    frame = {"width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "height": HEIGHT}
    return {"lines": found, "names": list(names), "end": end, "most": most, "frame": frame}


def curve(number: int, title: str, lines: Sequence[Line]) -> str:
    """The picture: bytes in memory against milliseconds, a line each."""
    return "".join(_curve(number, title, lines))


def _curve(number: int, title: str, lines: Sequence[Line]) -> Iterator[str]:
    end, most = _extent(lines)
    yield (
        f'<svg class="curve" data-curve="{number}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{text(title)}"><title>{text(title)}</title>'
    )
    for tick in range(TICKS + 1):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tick / TICKS
        x = LEFT + (WIDTH - LEFT - RIGHT) * tick / TICKS
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(most * tick // TICKS)}</text>'
        anchor = "middle" if tick < TICKS else "end"
        at = format_milliseconds(end * tick / TICKS)
        yield f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{at}</text>'
    for name, spans in lines:
        yield f'<path class="line {text(name)}" d="{_path(spans, end, most)}"/>'
    yield "</svg>"


def _path(spans: Sequence[Span], end: float, most: int) -> str:
    """A level for as long as a call takes, and up or down to the next."""
    found: list[str] = []
    for span in _by_start(spans):
        x = LEFT + (WIDTH - LEFT - RIGHT) * span.start_ms / end
        until = LEFT + (WIDTH - LEFT - RIGHT) * (span.start_ms + span.ms) / end
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * span.nbytes / most
        found.append(f"{'L' if found else 'M'}{x:.1f} {y:.1f}H{until:.1f}")
    return "".join(found)


def _by_start(spans: Sequence[Span]) -> list[Span]:
    """Calls of the compute stream in time; a copy lasts beside them."""
    return [span for span in spans if span.stream == "compute"]


def _extent(lines: Sequence[Line]) -> tuple[float, int]:
    """Milliseconds and bytes that the axes reach; above 0."""
    spans = [span for _, each in lines for span in each]
    end = max((span.start_ms + span.ms for span in spans), default=0.0)
    return end or 1.0, max((span.nbytes for span in spans), default=0) or 1


def _said(span: Span) -> str:
    """A call in words."""
    module = f" of {span.module}" if span.module else ""
    again = ", recomputed" if span.again else ""
    return f"{span.op}{module} ({span.phase}{again}){f' {span.line}' if span.line else ''}"


# What a report is made from.


@dataclass(frozen=True)
class Run:
    """A run at its end."""

    outcomes: tuple[Outcome, ...]
    planned: int
    """Cases that were chosen; fewer outcomes: the run ended early."""
    settings: Settings
    interrupted: bool
    fronts: tuple[tuple[str, Path], ...]
    """Model and picture of each front that this run wrote."""
    baselines: Mapping[Path, ModelBaseline | None]
    """As they were when the run began."""


# What a baseline file held before, by the log of its git repository; nothing where there is none.

MOST = 20
"""Commits that are looked at."""
SECONDS = 5.0
"""For one call of git: a slow disk must not hold up a run."""


@dataclass(frozen=True)
class Commit:
    """A commit that changed the file, and what it left there."""

    name: str
    date: str
    subject: str
    baseline: ModelBaseline


def history(path: Path) -> tuple[Commit, ...]:
    """The last commits that changed a baseline file, newest first; those that left no readable one are left out.

    Never raises: without git, repository or commits there is no history.
    """
    return tuple(_commits(path))


def _commits(path: Path) -> Iterator[Commit]:
    log = _git(path.parent, "log", f"--max-count={MOST}", "--format=%h%x1f%cs%x1f%s", "--", path.name)
    for line in (log or "").splitlines():
        name, date, subject = [*line.split("\x1f", 2), "", ""][:3]
        text = _git(path.parent, "show", f"{name}:./{path.name}")
        if text is None or len(text) > LARGEST_FILE:
            continue
        try:
            yield Commit(name, date, subject, parse(text, path))
        except BaselineError:
            continue


def _git(directory: Path, *arguments: str) -> str | None:
    """What git says; None where it cannot."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "--no-pager", "-C", str(directory), *arguments],
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None
