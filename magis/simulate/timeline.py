"""A step as a simulated time line: when each call starts, how long it takes, and the bytes in memory meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from magis.analysis.hazards import is_pure_view
from magis.ir import Graph, Op, Value
from magis.results import Span
from magis.simulate.replay import MemoryProfile, Workspace, inside, replay

__all__ = ["Times", "timeline"]

MOST_CALLS = 50_000
"""Of a time line in which the parts of loops are told one by one; in a longer one a loop is one call."""
NS_PER_MS = 1e6
UNTIMED = ("magis.wait", "magis.rng_save", "magis.rng_enter", "magis.rng_leave")
"""What the search counts no time for."""


class Times(Protocol):
    """What calls take, and how fast copies to and from the host are (0: there are none)."""

    @property
    def link_bytes_per_s(self) -> float: ...

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int: ...


@dataclass
class _Clock:
    """Nanoseconds at which each stream is free, and at which loaded storages are there."""

    compute: int = 0
    out: int = 0
    back: int = 0
    done: dict[int, int] = field(default_factory=dict)


def timeline(
    graph: Graph, times: Times, workspace: Workspace, profile: MemoryProfile, *, rounding: int = 1
) -> tuple[Span, ...]:
    """The calls of a schedule in order, views left out; ``profile`` is what ``replay`` says of its bytes.

    Copies run beside the operators, one at a time in each direction, as the search counts them: a store or a load
    starts once what was given to the compute stream before is done, and whoever takes a loaded tensor waits for it.
    """
    apart = sum(1 if op.body is None else op.body.parts * len(op.body.graph.ops) for op in graph.ops) <= MOST_CALLS
    return tuple(_calls(graph, times, workspace, profile.peaks, _Clock(), rounding, apart=apart))


def _calls(
    graph: Graph,
    times: Times,
    workspace: Workspace,
    levels: tuple[int, ...],
    clock: _Clock,
    rounding: int,
    *,
    apart: bool,
) -> Iterator[Span]:
    storage_of = {value.id: value.storage for value in graph.values.values()}
    seen: Counter[int] = Counter()
    for op, level in zip(graph.ops, levels, strict=True):
        for value in op.inputs():  # what was loaded must be there
            clock.compute = max(clock.compute, clock.done.get(storage_of[value], 0))
        if op.body is not None and apart:
            inner = replay(op.body.graph, workspace, rounding=rounding)
            outside = level - inside(op, graph, workspace, rounding)[1]
            above = tuple(outside + peak for peak in inner.peaks)
            for _ in range(op.body.parts):
                part = _Clock(clock.compute, clock.out, clock.back)
                yield from _calls(op.body.graph, times, workspace, above, part, rounding, apart=apart)
                clock.compute, clock.out, clock.back = part.compute, part.out, part.back
        elif op.target in ("magis.store", "magis.load"):
            yield _copied(graph, op, times, clock, level)
        elif op.target not in UNTIMED and not is_pure_view(graph, op):
            again = op.origin is not None and seen[op.origin] > 0
            seen[-1 if op.origin is None else op.origin] += 1
            spent = times.nanoseconds(op, graph.values)
            yield _span(op, clock.compute, spent, level, again=again)
            clock.compute += spent


def _copied(graph: Graph, op: Op, times: Times, clock: _Clock, level: int) -> Span:
    """A copy, in the queue of its direction; a loaded tensor is there when it is done."""
    (taken,) = op.inputs()
    spent = math.ceil(graph.storages[graph.values[taken].storage].nbytes * (1e9 / times.link_bytes_per_s))
    if op.target == "magis.store":
        start = max(clock.out, clock.compute)
        clock.out = start + spent
        return _span(op, start, spent, level, stream="to host")
    start = max(clock.back, clock.compute)
    clock.back = start + spent
    (made,) = op.made()
    clock.done[graph.values[made].storage] = clock.back
    return _span(op, start, spent, level, stream="from host")


def _span(op: Op, start_ns: int, ns: int, level: int, *, stream: str = "compute", again: bool = False) -> Span:
    return Span(op.target, op.module, op.phase, op.line, start_ns / NS_PER_MS, ns / NS_PER_MS, level, stream, again)
