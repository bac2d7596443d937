"""Scratch of operators within a step that runs on its own tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from magis.backend.codegen import compile_step
from magis.backend.measure import Allocation, allocations, memory_profile, replay
from magis.cost.signature import signature
from magis.ir import Graph, Op

__all__ = ["record_workspaces"]

_MARK = "magis step "


def record_workspaces(graph: Graph, tensors: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> dict[str, int]:
    """Bytes that each operator of a whole step allocates on the step's own numbers, by signature; on the CPU.

    `tensors` are those of `graph.inputs`; the step runs twice on them, as generated code does. Where calls of one
    signature differ, the most that any takes. The global random-number generator is left as it was.
    """
    count = 0

    def mark() -> None:
        nonlocal count
        with record_function(f"{_MARK}{count}"):
            count += 1

    step = compile_step(graph, between=mark)
    with torch.random.fork_rng(devices=[]):
        step(tensors, scalars)
        count = 0
        with memory_profile() as log, record_function(_MARK):
            kept = step(tensors, scalars)
    del kept
    found: dict[str, int] = {}
    calls, windows = [*_called(graph)], [*_between_marks(log)]
    if len(calls) != len(windows):
        return {}  # it is not known which window is whose
    for (op, inside), events in zip(calls, windows, strict=True):
        window = replay(events)
        key = signature(op, inside.values)
        # some kernels make what nobody asked for, which is scratch
        stays = min(window.kept_bytes, _made_bytes(op, inside)) if None in op.outputs else window.kept_bytes
        found[key] = max(found.get(key, 0), window.peak_bytes - stays)
    return found


def _called(graph: Graph) -> Iterator[tuple[Op, Graph]]:
    """Calls of torch's operators with their graph, in the order in which generated code makes them."""
    for op in graph.ops:
        if op.body is not None:
            for _ in range(op.body.parts):
                yield from _called(op.body.graph)
        elif not op.target.startswith("magis."):
            yield op, graph


def _made_bytes(op: Op, graph: Graph) -> int:
    given = {graph.values[value].storage for value in op.inputs()}
    fresh = {graph.values[value].storage for value in op.made()} - given
    return sum(graph.storages[storage].nbytes for storage in fresh)


def _between_marks(log: Any) -> Iterator[list[Allocation]]:
    """The allocator's events up to each mark, from the one before it on."""
    pending = list(log.kineto_results.experimental_event_tree())
    marks = []
    while pending:
        node = pending.pop()
        pending.extend(node.children)
        if node.name.startswith(_MARK) and node.name != _MARK:
            marks.append(node.start_time_ns)
    events = allocations(log)
    at = 0
    for moment in sorted(marks):
        first = at
        while at < len(events) and events[at].time_ns <= moment:
            at += 1
        yield events[first:at]
