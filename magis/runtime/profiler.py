"""Profiling of operators by signature: each is timed alone, with cold caches as in a step, on CPU or GPU.

A kernel that is called repeatedly finds its arguments, its results and its own code in the caches; in a step it does
not. So operators are timed in batches that are larger than any cache, in rounds: every round runs each operator of the
batch once, on arguments that all others have evicted since, and keeps the results until the next round, so that new
results do not reuse memory that was just freed. The time is the median of the rounds.

Arguments are made up (`magis.runtime.scratch`): harmless numbers in tensors of equal shapes, strides and dtypes.
Tensors that a call writes in-place are refilled before every round, or numbers would drift into overflow and denormals.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from magis.cost.profile_store import Entry, target_of
from magis.cost.shapes import parse_with_outputs
from magis.cost.signature import parse
from magis.errors import MagisError
from magis.ops.call import only_acts, resolve, to_torch
from magis.runtime.scratch import make_tensors, measure_workspaces
from magis.units import MIB

REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)
FILLING = 0.75


@dataclass(frozen=True)
class ProfilingEffort:
    """Effort of a profile: bytes of arguments and results per batch, rounds, and the seconds after which LEAST rounds
    are enough."""

    batch_bytes: int = 256 * MIB
    rounds: int = 15
    seconds: float = 10.0


LEAST = 5


class Stopwatch(Protocol):
    """Timer of calls, whose times may be available only later."""

    def time(self, call: Callable[[], object]) -> object:
        """Run and time `call`; return its result."""

    def times(self) -> Sequence[int]:
        """Return the nanoseconds of the calls since the last query, in call order."""


class Wall:
    """Timer that uses the host's clock, for a device whose calls are synchronous."""

    def __init__(self) -> None:
        self._times: list[int] = []

    def time(self, call: Callable[[], object]) -> object:
        start = time.perf_counter_ns()
        result = call()
        self._times.append(time.perf_counter_ns() - start)
        return result

    def times(self) -> Sequence[int]:
        found, self._times = self._times, []
        return found


@dataclass(frozen=True)
class CallBatch:
    """Signatures that are timed together, and the bytes of their arguments and results."""

    keys: tuple[str, ...]
    nbytes: int


def batches(keys: Iterable[str], limit: int) -> Iterator[CallBatch]:
    """Yield the signatures in batches that fit into `limit` bytes with arguments and results, in their order.
    Signatures that this torch refuses, or that are larger than the limit, are left out."""
    held: list[str] = []
    total = 0
    for key in keys:
        try:
            op, values = parse_with_outputs(key)
        except MagisError:  # this torch refuses the call
            continue
        # bytes of the arguments, and of the results of two rounds
        given = {values[number].storage for number in op.inputs()}
        size = sum(values[number].nbytes for number in dict.fromkeys(op.inputs()))
        size += 2 * sum(values[number].nbytes for number in op.made() if values[number].storage not in given)
        if size > limit:
            continue
        if held and total + size > limit:
            yield CallBatch(tuple(held), total)
            held, total = [], 0
        held.append(key)
        total += size
    if held:
        yield CallBatch(tuple(held), total)


def record(
    batch: CallBatch,
    effort: ProfilingEffort,
    device: torch.device,
    watch: Stopwatch,
    workspace: Callable[[str], int] | None = None,
) -> dict[str, Entry]:
    """Measure times and workspaces of a batch's operators, by signature, without operators that refuse made-up
    arguments."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        calls = [call for key in batch.keys if (call := prepared(key, device)) is not None]
        # overwritten in every round: the memory that a small batch needs in addition to exceed the caches
        lacking = torch.empty(max(0, effort.batch_bytes // 4 - batch.nbytes), dtype=torch.uint8, device=device)
        started = time.perf_counter()
        samples: list[Sequence[int]] = []
        for done in range(effort.rounds):
            if done >= LEAST and time.perf_counter() - started > effort.seconds:
                break
            for call in calls:
                call.refill()
            lacking.zero_()
            for call in calls:
                call.held = watch.time(call.run)
            samples.append(watch.times())
    scratch = measure_workspaces(parse(call.key) for call in calls) if workspace is None else {}
    entries = {}
    for call, times in zip(calls, map(sorted, zip(*samples, strict=True)), strict=True):
        count = len(times)
        spread = (times[(3 * count) // 4 if count > 1 else 0] - times[count // 4]) // 2  # half the interquartile range
        nbytes = workspace(call.key) if workspace is not None else scratch.get(call.key, 0)
        # a coarse clock sees no time pass in a view
        entries[call.key] = Entry(max(1, statistics.median_low(times)), spread, nbytes, count)
    return entries


@dataclass(eq=False)
class PreparedCall:
    """An operator with made-up arguments, and its last result."""

    key: str
    run: Callable[[], object]
    changed: Sequence[torch.Tensor]
    held: object = field(default=None, repr=False)

    def refill(self) -> None:
        for tensor in self.changed:
            tensor.fill_(FILLING)


def prepared(key: str, device: torch.device) -> PreparedCall | None:
    """Prepare a call and run it once; return None if the operator refuses the arguments."""
    try:
        op, values = parse(key)
        if only_acts(op.target):  # it only acts: made-up arguments would fail its check
            return None
        tensors = make_tensors(op, values, device)
        scalars = dict.fromkeys(op.scalars(), 1.0)
        args = [to_torch(arg, tensors, scalars, device) for arg in op.args]
        kwargs = {name: to_torch(arg, tensors, scalars, device) for name, arg in op.kwargs}
        overload = resolve(op.target)
        run: Callable[[], object] = partial(overload._op, *args, **kwargs)
        run()
    except (*REFUSALS, MagisError):
        return None
    written = _written_tensors(overload._schema, args, kwargs)
    return PreparedCall(key, run, [each for each in written if each.is_floating_point()])


def _written_tensors(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the dense tensors that the call's schema marks as written."""
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
    for each in schema.arguments:
        if each.alias_info is not None and each.alias_info.is_write:
            found = given.get(each.name)
            for tensor in found if isinstance(found, list) else [found]:
                if isinstance(tensor, torch.Tensor) and 0 not in tensor.stride():
                    yield tensor


def schemas(keys: Iterable[str]) -> dict[str, str]:
    """Return the schemas of the signatures' operators in this torch, by name; unknown operators are left out."""
    targets = {target_of(key) for key in keys}
    return {target: text for target in targets if (text := schema_of(target)) is not None}


def schema_of(target: str) -> str | None:
    """Return an operator's schema in this torch (name, arguments and results); None for an unknown operator."""
    try:
        return str(resolve(target)._schema)
    except MagisError:
        return None


# The profiler's timer and workspace counter for a GPU.
# A call returns before its kernels have run, so two events on the stream enclose it. The cost of an operator in a step
# is the larger of two times: that of the kernels between the events, and that of the host to enqueue the call; short
# kernels cost their launch.

LINK_BYTES, FEW_BYTES, COPIES = 256 * MIB, 512, 7
TOGETHER = 128
"""Calls that are enqueued between synchronizations: with a full stream the host would wait for other calls' kernels."""


class EventWatch:
    """Timer by CUDA events; `cuda` is `torch.cuda`, or a substitute in tests."""

    def __init__(self, cuda: Any) -> None:
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
    """Return the peak bytes that a call allocates beyond its new outputs, as rounded by the allocator. The call runs
    before, as libraries allocate a workspace of their own once and keep it."""
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
    """Return the bytes per second between pinned host memory and the device, in the slower direction; median of
    copies."""
    return LINK_BYTES * 1_000_000_000 // max(1, _copy_ns(device, LINK_BYTES))


def copy_overhead(device: torch.device) -> int:
    """Return the nanoseconds that a copy of a few bytes between pinned host memory and the device takes."""
    return _copy_ns(device, FEW_BYTES)


def _copy_ns(device: torch.device, nbytes: int) -> int:
    """Return the nanoseconds of a copy in the slower direction, the median of several."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    medians = []
    for target, source in ((there, host), (host, there)):
        watch = EventWatch(torch.cuda)
        for _ in range(COPIES):
            watch.time(partial(target.copy_, source, non_blocking=True))
        medians.append(sorted(watch.times())[COPIES // 2])
    return max(medians)
