"""Where a step's measured bytes part from its simulated ones: the first operator at which they differ.

The profiler logs operators and allocations of the step as it is, with no dispatch mode around it. Operators of the
graph are found in the log by name and order; kernels that call others, and calls that a graph leaves out, lie between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from magis.graph import Graph, Op
from magis.runtime.measure import Allocation, allocations, memory_profile
from magis.simulate.simulator import MemoryProfile

_WITHIN = 60
"""Logged calls among which the next operator is looked for."""


@dataclass(frozen=True)
class FirstDifference:
    """The first operator whose bytes are not as simulated."""

    op: Op
    simulated: int
    measured: int
    """Bytes above the step's start while it runs, at most."""

    def __str__(self) -> str:
        module = f"module {self.op.module!r}" if self.op.module else "the loss or the root module"
        where = f" ({self.op.line})" if self.op.line else ""
        return (
            f"{self.op.target} in the {self.op.phase} of {module}{where}, "
            f"simulated {self.simulated:,}, measured {self.measured:,} ({self.simulated - self.measured:+,})"
        )


def first_parting(run: Callable[[], object], graph: Graph, profile: MemoryProfile) -> FirstDifference | None:
    """Run the step, simulated as `graph` with `profile`; None if no operator that is found in its log differs."""
    with memory_profile() as log:
        kept = run()
    events = list(_levels(allocations(log)))
    del kept
    at = 0
    for position, start, end in _found(graph, _calls(log)):
        while at < len(events) and events[at][0] < start:
            at += 1
        level = events[at - 1][1] if at else 0
        peak = max((now for moment, now in _until(events, at, end)), default=level)
        simulated = profile.peaks[position] - profile.persistent_bytes
        if max(peak, level) != simulated:
            return FirstDifference(graph.ops[position], simulated, max(peak, level))
    return None


def _calls(log: Any) -> list[tuple[int, int, str]]:
    """Start, end and name of every call of an operator, by start."""
    pending, found = list(log.kineto_results.experimental_event_tree()), []
    while pending:
        node = pending.pop()
        pending.extend(node.children)
        if node.typed[0].name == "TorchOp":
            found.append((node.start_time_ns, node.end_time_ns, node.name))
    return sorted(found)


def _levels(events: Sequence[Allocation]) -> Iterator[tuple[int, int]]:
    """Moments, and the bytes that are allocated from then on; frees of what is older than the log do not count."""
    live: dict[int, int] = {}
    now = 0
    for event in events:
        freed = live.pop(event.address, 0)
        if event.nbytes > 0:
            live[event.address] = event.nbytes
        now += max(event.nbytes, 0) - freed
        yield event.time_ns, now


def _until(events: Sequence[tuple[int, int]], at: int, end: int) -> Iterator[tuple[int, int]]:
    while at < len(events) and events[at][0] <= end:
        yield events[at]
        at += 1


def _found(graph: Graph, calls: Sequence[tuple[int, int, str]]) -> Iterator[tuple[int, int, int]]:
    """Position, start and end of the graph's operators that make or write something, as far as the log has them."""
    at, free = 0, 0
    for position, op in enumerate(graph.ops):
        given = {graph.values[value].storage for value in op.inputs()}
        if not op.writes and all(graph.values[value].storage in given for value in op.made()):
            continue  # a window, which an operator may open in other ways
        name = "::".join(op.target.split(".")[:2])
        for here in range(at, min(at + _WITHIN, len(calls))):
            start, end, called = calls[here]
            if called == name and start >= free:
                yield position, start, end
                at, free = here + 1, end
                break
