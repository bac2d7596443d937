"""Pareto fronts as JSON and as pictures (paper, Figure 11); time lines for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from html import escape
from itertools import groupby
from typing import Any

from magis.results import CaseResult, ParetoFront, Span, Timelines
from magis.units import format_bytes, format_milliseconds

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


# Simulated time lines: thinned for a picture, and as a trace for Perfetto (https://ui.perfetto.dev).

CURVE = 512
"""Calls of a time line that is shown as a picture."""
STREAMS = ("compute", "to host", "from host")
US_PER_MS = 1000.0


def thinned_timelines(result: CaseResult) -> CaseResult:
    """The result with time lines of at most CURVE calls each, their peaks kept."""
    lines = result.timelines
    if lines is None:
        return result
    return replace(result, timelines=Timelines(thinned(lines.original, CURVE), thinned(lines.optimized, CURVE)))


def thinned(spans: tuple[Span, ...], most: int) -> tuple[Span, ...]:
    """At most ``most`` (at least 4) of the spans: first, last, lowest and highest of equal stretches, the peak kept."""
    if len(spans) <= most:
        return spans
    stretches = most // 4
    kept: set[int] = set()
    for stretch in range(stretches):
        places = range(stretch * len(spans) // stretches, (stretch + 1) * len(spans) // stretches)
        kept |= {places[0], places[-1]}
        kept |= {min(places, key=lambda at: spans[at].nbytes), max(places, key=lambda at: spans[at].nbytes)}
    return tuple(spans[at] for at in sorted(kept))


def trace_text(result: CaseResult) -> str:
    """Chrome's trace format (JSON): a process for each step, with a track of modules and their operators, one of copies
    in each direction, and a counter of bytes in memory. Times are microseconds; empty time lines make an empty trace.
    """
    lines = result.timelines or Timelines((), ())
    steps = [("original", lines.original)]
    if not result.case.has_one_step:  # whose optimized step is the original
        steps.append(("optimized", lines.optimized))
    events = [event for pid, (name, spans) in enumerate(steps, 1) for event in _process(pid, name, spans)]
    about = {"model": result.case.model, "strategy": result.case.strategy, "device": result.case.device}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n"


def _process(pid: int, name: str, spans: tuple[Span, ...]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{name} step, simulated"}}
    for tid, stream in enumerate(STREAMS, 1):
        own = [span for span in spans if span.stream == stream]
        if own:
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": stream}}
        for key, group in groupby(own, key=lambda span: (span.module, span.phase)):
            yield from _module(pid, tid, key, list(group))
    for span in spans:
        yield {
            "ph": "C", "pid": pid, "name": "memory", "ts": span.start_ms * US_PER_MS, "args": {"bytes": span.nbytes},
        }  # fmt: skip


def _module(pid: int, tid: int, key: tuple[str, str], spans: list[Span]) -> Iterator[dict[str, Any]]:
    """Calls of one module that follow each other, as one slice around theirs."""
    module, phase = key
    start, end = spans[0].start_ms, spans[-1].start_ms + spans[-1].ms
    if module:
        yield _slice(pid, tid, f"{module} ({phase})", start, end - start) | {"cat": phase}
    for span in spans:
        args = {"module": span.module, "line": span.line, "bytes in memory": span.nbytes, "again": span.again}
        yield _slice(pid, tid, span.op, span.start_ms, span.ms) | {"cat": phase, "args": args}


def _slice(pid: int, tid: int, name: str, start_ms: float, ms: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start_ms * US_PER_MS, "dur": ms * US_PER_MS}
