"""A Pareto front as JSON text and as a picture: memory ratio against latency overhead (paper, Figure 11)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from html import escape

from magis.results import ParetoFront
from magis.units import format_bytes, format_milliseconds

# What pictures are drawn with: one look for all of them, no dependency.

GRID, TEXT = "#cccccc", "#333333"


def framed(size: tuple[int, int], elements: Iterator[str]) -> Iterator[str]:
    """The lines of a picture of ``size`` (width, height) in pixels, on white."""
    width, height = size
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    yield from elements
    yield "</svg>"


def label(where: tuple[float, float], words: str, anchor: str = "start", colour: str = TEXT) -> str:
    """A line of text; ``anchor`` says which end of it is at ``where``."""
    return (
        f'<text x="{where[0]:.1f}" y="{where[1]:.1f}" font-family="sans-serif" font-size="12" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def across(left: float, right: float, y: float, colour: str = GRID, dashes: str = "") -> str:
    """A horizontal line."""
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{colour}"{pattern}/>'


SCHEMA = 1
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 56
OURS, EAGER, BOUND = "#1f618d", "#b03a2e", "#7d8a2e"
LEAST_OVERHEAD = 0.1
"""The axis of the overhead reaches at least this far."""


def front_text(front: ParetoFront) -> str:
    """The front as JSON: bytes, milliseconds; ratios are left to the reader."""
    return json.dumps({"schema": SCHEMA, **asdict(front)}, indent=1, sort_keys=True) + "\n"


def front_svg(front: ParetoFront) -> str:
    """The front as a stand-alone picture, with eager and the lower bound."""
    worst = max((point.latency_ms for point in front.points), default=0.0) / front.original.latency_ms - 1
    return "\n".join(framed((WIDTH, HEIGHT), _lines(front, max(LEAST_OVERHEAD, worst)))) + "\n"


def _lines(front: ParetoFront, most: float) -> Iterator[str]:
    """The picture's elements; overheads from 0 to ``most`` fill its width."""
    eager = front.original

    def x(overhead: float) -> float:
        return LEFT + max(0.0, min(1.0, overhead / most)) * (WIDTH - LEFT - RIGHT)

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - ratio * (HEIGHT - TOP - BOTTOM)

    title = f"{front.model} ({front.preset}, {front.dtype}) on {front.device}: peak memory against latency, simulated"
    yield label((LEFT, 22), title)
    if front.provenance.source:
        yield label((LEFT, 38), f"priced by {front.provenance.source}, {front.provenance.measured:.0%} of it measured")
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        yield across(LEFT, WIDTH - RIGHT, at)
        yield label((LEFT - 8, at + 4), f"{tenth / 10:.1f}", "end")
    for quarter in range(5):
        overhead = most * quarter / 4
        yield label((x(overhead), HEIGHT - BOTTOM + 18), f"{100 * overhead:+.1f}%", "middle")
    yield label(((LEFT + WIDTH) / 2, HEIGHT - 12), "latency overhead to eager", "middle")
    yield label((LEFT - 56, TOP - 10), "peak / eager's")
    bound = front.lower_bound_bytes / eager.peak_bytes
    yield across(LEFT, WIDTH - RIGHT, y(bound), BOUND, dashes="6 4")
    yield label((WIDTH - RIGHT, y(bound) - 5), f"lower bound {format_bytes(front.lower_bound_bytes)}", "end", BOUND)
    places = [(x(p.latency_ms / eager.latency_ms - 1), y(p.peak_bytes / eager.peak_bytes)) for p in front.points]
    yield f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in places)}" fill="none" stroke="{OURS}"/>'
    for (a, b), point in zip(places, front.points, strict=True):
        what = f"{format_bytes(point.peak_bytes)}, {format_milliseconds(point.latency_ms)}"
        yield (
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{OURS}"><title>{escape(what)}'
            f"{escape('; ' + point.fission) if point.fission else ''}</title></circle>"
        )
    yield f'<circle cx="{x(0):.1f}" cy="{y(1):.1f}" r="5" fill="{EAGER}"/>'
    what = f"eager: {format_bytes(eager.peak_bytes)}, {format_milliseconds(eager.latency_ms)}"
    yield label((x(0) + 10, y(1) - 6), what, colour=EAGER)
