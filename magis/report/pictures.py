"""Pareto fronts as JSON and SVG (paper, Figure 11); time lines as Perfetto traces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from typing import Any

from magis.printable import printable
from magis.report.axes import Label, decimal_scale, placed
from magis.results import CaseResult, FrontPoint, ParetoFront, Span, Timelines
from magis.units import format_bytes, format_milliseconds

GRID, TEXT = "#cccccc", "#333333"
OURS, EAGER, BOUND = "#1f618d", "#b03a2e", "#5f6b1e"
DARK = {"white": "#14181d", GRID: "#333d47", TEXT: "#e4e9ee", OURS: "#7ab8e6", EAGER: "#ff9d8f", BOUND: "#c9d66b"}
"""Light-theme colour -> dark-theme colour."""


def framed(size: tuple[int, int], title: str, elements: Iterable[str], description: str = "") -> Iterator[str]:
    """Yield the lines of an SVG picture of ``size`` (width, height) in pixels, with light and dark theme."""
    width, height = size
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img"><title>{printable(title, "html")}</title><desc>{printable(description, "html")}</desc>'
    )
    dark = "".join(f'[fill="{old}"]{{fill:{new}}}[stroke="{old}"]{{stroke:{new}}}' for old, new in DARK.items())
    yield f"<style>@media (prefers-color-scheme: dark) {{{dark}}}</style>"
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    yield from elements
    yield "</svg>"


def label(where: tuple[float, float], words: str, anchor: str = "start", colour: str = TEXT) -> str:
    """Return an SVG text element; ``anchor``: end of the text that is at ``where``."""
    return (
        f'<text x="{where[0]:.1f}" y="{where[1]:.1f}" font-family="sans-serif" font-size="12" fill="{colour}" '
        f'text-anchor="{anchor}">{printable(words, "html")}</text>'
    )


def across(left: float, right: float, y: float, colour: str = GRID, dashes: str = "") -> str:
    """Return an SVG element for a horizontal line."""
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{colour}"{pattern}/>'


SCHEMA = 1
WIDTH, HEIGHT = 640, 452
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 76, 56
LEAST_OVERHEAD = 0.1
"""Minimum range of the overhead axis, as a fraction."""
BESIDE = (
    (7, -6, "start"), (9, 4, "start"), (0, -9, "middle"), (0, -9, "end"), (-7, 15, "end"), (-9, 4, "end"),
    (0, 16, "middle"), (0, -24, "end"),
)  # fmt: skip
"""Offsets of a point's label and anchors, in order of preference: above right first, away from the steep line."""
APART = 6.0
"""Distance in pixels of points on a line that labels must not cover."""


def front_text(front: ParetoFront) -> str:
    """Return the front as JSON, in bytes and milliseconds."""
    return json.dumps({"schema": SCHEMA, **asdict(front)}, indent=1, sort_keys=True) + "\n"


def front_svg(front: ParetoFront) -> str:
    """Return the front as a stand-alone SVG picture, with eager and the lower bound."""
    eager = front.original
    title = f"{front.model} ({front.preset}, {front.dtype}) on {front.device}: peak memory against latency, simulated"
    said = "; ".join(_format_point(point) for point in front.points)
    about = f"eager: {_format_point(eager)}. {len(front.points)} plans: {said}. Lower bound: "
    lines = _front_elements(front, title)
    return "\n".join(framed((WIDTH, HEIGHT), title, lines, about + format_bytes(front.lower_bound_bytes))) + "\n"


def _format_point(point: FrontPoint) -> str:
    return f"{format_bytes(point.peak_bytes)}, {format_milliseconds(point.latency_ms)}"


def _front_elements(front: ParetoFront, title: str) -> Iterator[str]:
    """Yield the SVG elements of a front."""
    eager = front.original
    worst = max((point.latency_ms for point in front.points), default=0.0) / eager.latency_ms - 1
    overheads, ratios = decimal_scale(100 * max(LEAST_OVERHEAD, worst), "%"), decimal_scale(1.0)

    def place(point: FrontPoint) -> tuple[float, float]:
        return x(100 * (point.latency_ms / eager.latency_ms - 1)), y(point.peak_bytes / eager.peak_bytes)

    def x(percent: float) -> float:
        return LEFT + max(0.0, overheads.share(percent)) * (WIDTH - LEFT - RIGHT)

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - ratios.share(ratio) * (HEIGHT - TOP - BOTTOM)

    yield label((8, 20), title)
    if front.provenance.source:
        yield label((8, 36), f"priced by {front.provenance.source}, {front.provenance.measured:.0%} of it measured")
    for ratio in ratios.ticks:
        yield across(LEFT, WIDTH - RIGHT, y(ratio))
        yield label((LEFT - 8, y(ratio) + 4), ratios.number(ratio), "end")
    for percent in overheads.ticks:
        yield label((x(percent), HEIGHT - BOTTOM + 18), f"+{overheads.number(percent)}%" if percent else "0", "middle")
    yield label(((LEFT + WIDTH) / 2, HEIGHT - 12), "latency overhead to eager", "middle")
    yield label((8, TOP - 22), "peak / eager's")
    bound = y(front.lower_bound_bytes / eager.peak_bytes)
    yield across(LEFT, WIDTH - RIGHT, bound, BOUND, dashes="6 4")
    places = [place(point) for point in front.points]
    stairs = _staircase(places)
    yield f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in stairs)}" fill="none" stroke="{OURS}"/>'
    for (a, b), point in zip(places, front.points, strict=True):
        what = f"{_format_point(point)}{'; ' + point.fission if point.fission else ''}"
        yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{OURS}"><title>{printable(what, "html")}</title></circle>'
    yield f'<circle cx="{x(0):.1f}" cy="{y(1):.1f}" r="5" fill="{EAGER}"/>'
    words = f"lower bound {format_bytes(front.lower_bound_bytes)}"
    ends = ((WIDTH - RIGHT, "end"), (LEFT + 4, "start"), ((LEFT + WIDTH) / 2, "middle"))
    labels = [
        Label(f"eager: {_format_point(eager)}", ((x(0) + 10, y(1) - 6, "start"),), EAGER),
        Label(words, tuple((at, bound + by, anchor) for by in (-5, 15) for at, anchor in ends), BOUND),
    ]
    marks = [(x(0), y(1)), *_points_along(stairs)]
    around = [(a - 4, b - 4, a + 4, b + 4) for a, b in marks] + [(LEFT, bound - 1, WIDTH - RIGHT, bound + 1)]
    beside = [
        Label(
            format_bytes(point.peak_bytes),
            tuple((a + dx, b + dy, anchor) for dx, dy, anchor in BESIDE),
            OURS,
        )
        for (a, b), point in zip(places, front.points, strict=True)
    ]  # the ends of the front first, which matter most
    labels += [*beside[:1], *beside[:0:-1]]
    for found, (a, b, anchor) in placed(labels, around, (LEFT, 0, WIDTH, HEIGHT - BOTTOM)):
        yield label((a, b), found.words, anchor, found.colour)


def _staircase(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of a front: between two plans, the peak is that of the faster one, since none lies between."""
    ordered = sorted(places)
    return [corner for (a, b), (c, d) in pairwise(ordered) for corner in ((a, b), (c, b))] + ordered[-1:]


def _points_along(corners: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield points along a line, `APART` pixels apart at most, all corners included."""
    yield from corners[:1]
    for (a, b), (c, d) in pairwise(corners):
        steps = max(1, math.ceil(math.hypot(c - a, d - b) / APART))
        yield from ((a + (c - a) * step / steps, b + (d - b) * step / steps) for step in range(1, steps + 1))


# Simulated time lines as a trace for Perfetto (https://ui.perfetto.dev).

STREAMS = ("compute", "to host", "from host", "messages")
US_PER_MS = 1000.0


def trace_text(result: CaseResult) -> str:
    """Return both time lines as a Chrome trace (JSON).

    Each step is a process with a track per stream (operators by module; copies; collectives) and a counter of bytes in
    memory. Times are in microseconds; empty time lines give an empty trace.
    """
    lines = result.timelines or Timelines((), ())
    steps = [("original", lines.original)]
    if not result.case.has_one_step:  # else the optimized step is the original
        steps.append(("optimized", lines.optimized))
    events = [event for pid, (name, spans) in enumerate(steps, 1) for event in _step_events(pid, name, spans)]
    about = {"model": result.case.model, "strategy": result.case.strategy, "device": result.case.device}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n"


def _step_events(pid: int, name: str, spans: tuple[Span, ...]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{name} step, simulated"}}
    for tid, stream in enumerate(STREAMS, 1):
        own = [span for span in spans if span.stream == stream]
        if own:
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": stream}}
        for key, group in groupby(own, key=lambda span: (span.module, span.phase)):
            yield from _module_events(pid, tid, key, list(group))
    for span in spans:
        yield {
            "ph": "C", "pid": pid, "name": "memory", "ts": span.start_ms * US_PER_MS, "args": {"bytes": span.nbytes},
        }  # fmt: skip


def _module_events(pid: int, tid: int, key: tuple[str, str], spans: list[Span]) -> Iterator[dict[str, Any]]:
    """Yield trace events of successive calls of one module, and a slice around them."""
    module, phase = key
    start, end = spans[0].start_ms, spans[-1].start_ms + spans[-1].ms
    if module:
        yield _slice_event(pid, tid, f"{module} ({phase})", start, end - start) | {"cat": phase}
    for span in spans:
        args = {"module": span.module, "line": span.line, "bytes in memory": span.nbytes, "again": span.again}
        yield _slice_event(pid, tid, span.op, span.start_ms, span.ms) | {"cat": phase, "args": args}


def _slice_event(pid: int, tid: int, name: str, start_ms: float, ms: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start_ms * US_PER_MS, "dur": ms * US_PER_MS}
