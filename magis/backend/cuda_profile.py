"""The profiler's clock and scratch counter for a GPU.

A call returns before its kernels have run, so each is enclosed by two events on the stream. What a step pays for an
operator is the larger of two times: the kernels' between the events, and the host's for issuing the call, which
PyTorch does operator by operator; short kernels cost their launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from magis.backend.profiler import prepared
from magis.units import MIB

__all__ = ["EventWatch", "Events", "cuda_workspace", "link_speed"]


LINK_BYTES, COPIES = 256 * MIB, 7
TOGETHER = 128
"""Calls that are issued without waiting: a stream that is full would make the host wait for other calls' kernels."""


class Events(Protocol):
    """What the clock needs of `torch.cuda`."""

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 (torch's name)
        """A mark that is put into the stream; `elapsed_time` gives milliseconds between two of them."""

    def synchronize(self) -> None:
        """Wait until the device has done everything."""


class EventWatch:
    """Times calls by events; `cuda` is `torch.cuda`, or stands in for it."""

    def __init__(self, cuda: Events) -> None:
        self._cuda = cuda
        self._calls: list[tuple[Any, Any, int]] = []

    def time(self, call: Callable[[], object]) -> object:
        if len(self._calls) % TOGETHER == 0:
            self._cuda.synchronize()
        before, after = (self._cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        start = time.perf_counter_ns()
        result = call()
        host = time.perf_counter_ns() - start
        after.record()
        self._calls.append((before, after, host))
        return result

    def times(self) -> Sequence[int]:
        self._cuda.synchronize()
        calls, self._calls = self._calls, []
        return [max(round(before.elapsed_time(after) * 1e6), host) for before, after, host in calls]


def cuda_workspace(key: str, device: torch.device) -> int:
    """Bytes that a call allocates at its worst moment beyond its fresh outputs, in the allocator's own steps.

    It has run before: libraries allocate their own workspace once, which lives on.
    """
    call = prepared(key, device)
    if call is None:
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call.run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    fresh = torch.cuda.memory_allocated(device) - before
    del result
    return max(0, peak - fresh)


def link_speed(device: torch.device) -> int:
    """Bytes a second between pinned host memory and the device, of the slower direction; median of a few copies."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((there, host), (host, there)):
        watch = EventWatch(torch.cuda)
        for _ in range(COPIES):
            watch.time(partial(target.copy_, source, non_blocking=True))
        rates.append(LINK_BYTES * 1_000_000_000 // max(1, sorted(watch.times())[COPIES // 2]))
    return min(rates)
