"""Scratch of operators one by one, on made-up arguments, under one profile of the CPU allocator for all of them.

One call before the measured one lets kernels fill their caches, which are no scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

from magis.aten.call import call, resolve
from magis.aten.layouts import masked
from magis.aten.packed import IN_TRAINING
from magis.backend.made_up import make_tensors
from magis.backend.measure import Allocation, allocations, memory_profile, replay
from magis.cost.signature import signature
from magis.ir.types import Op, Value

__all__ = ["measure_here"]

_MARK = "magis workspace "


@dataclass(frozen=True, slots=True)
class _Call:
    """One measured call: which mark of the log it is, and the bytes of the fresh storages that it
    returned."""

    key: str
    fresh_bytes: int


def measure_here(items: Iterable[tuple[Op, Mapping[int, Value]]]) -> dict[str, int]:
    """Bytes that each operator allocates in this process, on made-up arguments, by signature.

    Runs every distinct signature of `items` (operator, values of the graph) twice with the thread count in force; never
    more than one signature's arguments are alive. The global random-number generator is left as it was.
    """
    distinct: dict[str, tuple[Op, Mapping[int, Value]]] = {}
    for op, values in items:
        distinct.setdefault(signature(op, values), (op, values))
    calls: list[_Call] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), memory_profile() as log:
        for key, (op, values) in distinct.items():
            fresh = _call_marked(op, values, f"{_MARK}{len(calls)}")
            if fresh is not None:
                calls.append(_Call(key, fresh))
    windows = _marked_windows(log)
    found = {}
    for number, measured in enumerate(calls):
        peak = replay(windows[f"{_MARK}{number}"]).peak_bytes
        found[measured.key] = max(0, peak - measured.fresh_bytes)
    return found


def _call_marked(op: Op, values: Mapping[int, Value], mark: str) -> int | None:
    """Call `op` under `mark`; bytes of the storages that it made and returned, or None if it refuses."""
    tensors = make_tensors(op, values)
    scalars = dict.fromkeys(op.scalars(), 1.0)
    made = [values[number] for number in op.made()]
    packs = op.target in IN_TRAINING and (not made or made[-1].numel > 0)
    older = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    with torch.set_grad_enabled(packs):
        try:
            call(op, tensors, scalars)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None
        with record_function(mark):
            results = call(op, tensors, scalars)
    # without what some kernels make although nobody asked for it
    wanted: tuple[torch.Tensor | None, ...] = masked(resolve(op.target), op.args, results)
    fresh: dict[int, int] = {
        storage.data_ptr(): storage.nbytes()
        for storage in (result.untyped_storage() for result in wanted if result is not None)
        if storage.data_ptr() not in older
    }
    return sum(fresh.values())


def _marked_windows(log: Any) -> dict[str, list[Allocation]]:
    """The allocator's events between start and end of every mark, by mark."""
    marks = [
        (node.start_time_ns, node.end_time_ns, node.name)
        for node in log.kineto_results.experimental_event_tree()
        if node.name.startswith(_MARK)
    ]
    windows: dict[str, list[Allocation]] = {name: [] for _, _, name in marks}
    events = iter(allocations(log))
    event = next(events, None)
    for start, end, name in sorted(marks):
        while event is not None and event.time_ns <= end:
            if event.time_ns >= start:
                windows[name].append(event)
            event = next(events, None)
    return windows
