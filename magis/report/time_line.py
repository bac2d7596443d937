"""Simulated time lines: thinned for a picture, and as a trace for Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from magis.results import CaseResult, Span, Timelines

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
    if result.case.strategy != "eager":  # whose optimized step is the original
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
