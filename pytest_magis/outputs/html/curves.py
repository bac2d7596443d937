"""Memory over time of both steps: a picture that needs no script, and the data with which a script says more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from magis.results import Span
from magis.units import format_bytes, format_milliseconds
from pytest_magis.outputs.html.marks import text

__all__ = ["curve", "curve_data"]

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
