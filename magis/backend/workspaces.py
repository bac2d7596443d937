"""Workspaces measured in isolation: the scratch bytes that each operator allocates, by signature.

Each distinct signature is called on made-up arguments of the same shapes, strides and types, under one
profile of the CPU allocator for all of them. Workspaces depend on the instruction set, on the number of
threads and on the torch version (the device identity), not on the numbers in the tensors.

The made-up numbers only have to be harmless: floats in [0.5, 1) (valid variances and probabilities), whole
numbers 0 (valid indices), scalars 1. One call before the measured one lets kernels fill their caches, which
are no scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

from magis.aten.call import call
from magis.backend.measure import Allocation, allocations, memory_profile, replay
from magis.cost.signature import signature
from magis.ir.types import ITEM_SIZE, Arg, Op, Scalar, Value

__all__ = ["make_tensors", "measure_workspaces", "scalar_names"]

_MARK = "magis workspace "


@dataclass(frozen=True, slots=True)
class _Call:
    """One measured call: which mark of the log it is, and the bytes of the fresh storages that it
    returned."""

    key: str
    fresh_bytes: int


def measure_workspaces(
    items: Iterable[tuple[Op, Mapping[int, Value]]], limit_bytes: int | None = None
) -> dict[str, int]:
    """Bytes that each operator allocates at its worst moment beyond its fresh outputs, by signature; on the
    CPU.

    Runs every distinct signature of `items` (operator, values of the graph) twice with the thread count in
    force; never more than one signature's arguments are alive. Left out of the answer: operators that refuse
    made-up arguments (they raise), and, with `limit_bytes`, those whose arguments and outputs alone are
    larger than that. The result repeats exactly. The global random-number generator is left as it was.
    """
    distinct: dict[str, tuple[Op, Mapping[int, Value]]] = {}
    for op, values in items:
        distinct.setdefault(signature(op, values), (op, values))
    calls: list[_Call] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), memory_profile() as log:
        for key, (op, values) in distinct.items():
            if limit_bytes is None or _bytes(op, values) <= limit_bytes:
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
    scalars = dict.fromkeys(scalar_names(op), 1.0)
    older = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    try:
        call(op, tensors, scalars)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None
    with record_function(mark):
        results = call(op, tensors, scalars)
    fresh = {
        storage.data_ptr(): storage.nbytes()
        for storage in (result.untyped_storage() for result in results if result is not None)
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


def make_tensors(op: Op, values: Mapping[int, Value], device: torch.device | str = "cpu") -> dict[int, torch.Tensor]:
    """Made-up tensors for the inputs of `op` by value id: exact shapes, strides and types, storages apart.

    The numbers come from a fixed seed and are the same for every call.
    """
    generator = torch.Generator(device).manual_seed(0)
    return {number: _tensor(values[number], generator) for number in dict.fromkeys(op.inputs())}


def scalar_names(op: Op) -> tuple[str, ...]:
    """Names of the numbers that `op` takes when the step runs."""
    found: list[str] = []
    pending: list[Arg] = [*op.args, *(arg for _, arg in op.kwargs)]
    while pending:
        arg = pending.pop()
        if isinstance(arg, tuple):
            pending.extend(arg)
        elif isinstance(arg, Scalar):
            found.append(arg.name)
    return tuple(dict.fromkeys(reversed(found)))


def _tensor(value: Value, generator: torch.Generator) -> torch.Tensor:
    """A tensor as `value` describes it, at offset 0 of a storage that is just large enough."""
    dtype: torch.dtype = getattr(torch, value.dtype)
    reach = _reach(value)
    flat: torch.Tensor
    if dtype == torch.bool:
        flat = torch.rand(reach, generator=generator, device=generator.device) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        flat = torch.rand(reach, generator=generator, device=generator.device).add_(1).mul_(0.5).to(dtype)
    else:
        flat = torch.zeros(reach, dtype=dtype, device=generator.device)
    # filled before it is strided: an expanded tensor (stride 0) cannot be written in place
    return flat.as_strided(value.shape, value.stride)


def _reach(value: Value) -> int:
    """Elements from the first to the last that the strides touch."""
    if value.numel == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))


def _bytes(op: Op, values: Mapping[int, Value]) -> int:
    touched = dict.fromkeys((*op.inputs(), *op.made()))
    return sum(_reach(values[number]) * ITEM_SIZE[values[number].dtype] for number in touched)
