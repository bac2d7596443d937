"""Exact peak memory of a callable, and what the device is.

On the CPU the truth is the allocator's own event log, which `torch.profiler` keeps: every allocation and
every free with its address, scratch inside operators included. Resident-set sizes are no substitute (the C
library keeps freed pages). Three traps, seen on torch 2.13:

* A free of a tensor that is older than the window may or may not be logged (the allocator remembers addresses
  from earlier profiles only), so frees of addresses that the window did not allocate itself are left out: the
  result is the peak *above the window's start* as if older tensors stayed.
* The log is a tree of operators with a branch per thread: it is flattened and ordered by time.
* Starting and stopping the profiler prints `USDT:` lines from C++, out of reach of `sys.stderr`.

Tensors alone are followed by a dispatch mode with weak references on storages, in a run of its own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from magis.cost.devices import CONSTANTS_VERSION, find_device
from magis.ops.eager_only import formulas_as_eager
from magis.ops.generators import states_recorded
from magis.runtime.storage_ledger import StorageLedger
from magis.units import GIB

_MEMORY_TABLE = Path("/proc/meminfo")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_NOISE = (
    b"USDT:",
    b"Memory block of unknown size was allocated before the profiling started",
    b"disableProfiler called but no active profiling session found",
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One event of the allocator, `time_ns` nanoseconds after an arbitrary start; `nbytes` < 0 is a free."""

    time_ns: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WindowPeak:
    """Bytes allocated in a window above its start: at the worst moment, and those still there at its end."""

    peak_bytes: int
    kept_bytes: int
    reserved_bytes: int | None = None
    """Peak that a GPU's caching allocator held, above what was allocated at the start; None on a CPU."""


def window_peak(fn: Callable[[], object], device: torch.device | str = "cpu") -> WindowPeak:
    """Run `fn` once and return its peak of allocated bytes above the start, scratch inside operators included.

    What `fn` returns stays alive until the window ends. On CUDA the caching allocator's own counters are read
    after a reset (blocks rounded to 512 bytes), with nothing cached at the start; there, a tensor that is older
    than the window and freed inside it lowers the peak, which it does not on the CPU: free none.
    """
    where = torch.device(device)
    if where.type == "cuda":
        return _cuda_peak(fn, where)
    with memory_profile() as window:
        kept = fn()
    peak = replay(allocations(window))
    del kept  # only now: the log was closed while it was alive
    return peak


def replay(events: Iterable[Allocation]) -> WindowPeak:
    """Return the highest sum of live bytes over `events` in the order given, and the sum at the end. A free of an
    address that no earlier event allocated is older than the window and does not count."""
    live: dict[int, int] = {}
    now = peak = 0
    for event in events:
        if event.nbytes < 0:
            now -= live.pop(event.address, 0)
        else:
            # an address that comes twice was freed in between where the log does not reach
            now += event.nbytes - live.get(event.address, 0)
            live[event.address] = event.nbytes
            peak = max(peak, now)
    return WindowPeak(peak, now)


@contextmanager
def collector_spared(*, collect: bool = True) -> Iterator[None]:
    """Keep the garbage collector from looking through what exists before the block: modules, graphs, a whole torch.

    Measuring collects before every window; most of its time would go into objects that live as long as the process.
    Where garbage that is there already harms nothing, nobody need ``collect`` it first.
    """
    if gc.get_freeze_count():  # somebody else's decision, which cannot be told apart from ours afterwards
        yield
        return
    if collect:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now, and in the block only if asked: else cycles die depending on what ran earlier."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def memory_profile() -> Iterator[profile]:
    """Log the block's allocations on the CPU, without a printed word; read the log with `allocations`.

    The garbage collector runs before the block and not inside it: when cycles die depends on what ran
    earlier, and the peak must not.
    """
    with no_collection(), quiet_profiler(), profile(profile_memory=True) as log:
        yield log


def logged(log: profile) -> Iterator[Any]:
    """Yield all nodes of a finished `memory_profile`: depth first, in order."""
    results: Any = log.kineto_results
    pending = list(reversed(results.experimental_event_tree()))
    while pending:
        node = pending.pop()
        pending.extend(reversed(node.children))
        yield node


def allocations(log: profile) -> list[Allocation]:
    """Return the CPU allocator's events in a finished `memory_profile`, ordered by time; of equal times as logged."""
    found = [
        Allocation(node.start_time_ns, node.typed[1].ptr, node.typed[1].alloc_size)
        for node in logged(log)
        if node.typed[0].name == "Allocation" and node.typed[1].device.type == "cpu"
    ]
    return sorted(found, key=lambda event: event.time_ns)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's own lines out of standard output and error; everything else comes through, at the end. The
    lines are written by C++ to the descriptors themselves, hence the detour over temporary files."""
    saved: dict[int, tuple[int, Any]] = {}
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for descriptor in (1, 2):
        try:
            copy = os.dup(descriptor)
        except OSError:  # closed: nothing to keep clean
            continue
        detour = tempfile.TemporaryFile()  # noqa: SIM115 (closed below, once the descriptor is back)
        os.dup2(detour.fileno(), descriptor)
        saved[descriptor] = (copy, detour)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for descriptor, (copy, detour) in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
            with detour:
                detour.seek(0)
                lines = [line for line in detour if not any(noise in line for noise in _NOISE)]
            if lines:
                os.write(descriptor, b"".join(lines))


def _cuda_peak(fn: Callable[[], object], device: torch.device) -> WindowPeak:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what earlier steps left would count as reserved by this one
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    kept = fn()
    torch.cuda.synchronize(device)
    peak = WindowPeak(
        torch.cuda.max_memory_allocated(device) - start,
        torch.cuda.memory_allocated(device) - start,
        torch.cuda.max_memory_reserved(device) - start,
    )
    del kept
    return peak


def tensor_peak(fn: Callable[[], object]) -> int:
    """Run `fn` once and return the peak bytes of tensors alone that it makes, above the start.

    Counted after every operator, with its inputs and outputs alive: the sum of the storages (each once,
    however many views it has) that were made since the start. The same on every device, where kernels keep to
    the shapes and strides that they declare. Tensors without a storage (sparse ones) are not counted.
    """
    ledger = StorageLedger()
    # A GPU's states lie in memory of the host, which is not counted.
    states = nullcontext() if torch.cuda.is_initialized() else states_recorded("cpu", {})
    with no_collection():
        with formulas_as_eager(), states, ledger:
            kept = fn()
        del kept
    return ledger.peak_bytes


def device_identity(device: str) -> dict[str, str]:
    """Return the conditions under which workspaces and times of `device` hold; only figures of equal ones are compared.

    "cpu": instruction set that the kernels use, threads in force, torch version, and what oneDNN is told, if anything.
    "cuda": GPU, torch and CUDA version. "sim:<name>": the version of the devices' constants. Raises UnknownDevice for
    other names.
    """
    if device == "cpu":
        return {
            "device": "cpu",
            "instruction set": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "torch": str(torch.__version__),
            **_onednn_settings(),
        }
    if device == "cuda":
        return {
            "device": "cuda",
            "gpu": torch.cuda.get_device_name(),
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
        }
    return {"device": find_device(device).name, "constants": str(CONSTANTS_VERSION)}


_ONEDNN = ("MAX_CPU_ISA", "CPU_ISA_HINTS", "DEFAULT_FPMATH_MODE")
"""Variables that choose oneDNN's kernels, and with them scratch bytes. Each has an older name, too."""


def _onednn_settings() -> dict[str, str]:
    """Return settings that make oneDNN take other kernels than it would, as one entry, if there are any."""
    backend: Any = torch.backends.mkldnn  # torch's stubs lack some of what it holds
    told = [f"{name}={os.environ.get(f'ONEDNN_{name}') or os.environ.get(f'DNNL_{name}')}" for name in _ONEDNN]
    found = [each for each in told if not each.endswith("=None")]
    found += [] if backend.enabled else ["off"]
    found += sorted({each.fp32_precision for each in (backend.conv, backend.matmul)} - {"none", "ieee"})
    return {"oneDNN": " ".join(found)} if found else {}


def device_memory(device: str) -> int:
    """Return the memory of `device` in bytes: of the machine or its container for "cpu", a constant for
    "sim:<name>"."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    if device != "cpu":
        return find_device(device).memory_bytes
    return min(_meminfo("MemTotal"), _container_limit()[0])


def free_device_memory(device: str) -> int:
    """Return the bytes that a step may still allocate on `device`; a simulated device is empty."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + cached
    if device != "cpu":
        return find_device(device).memory_bytes
    limit, used = _container_limit()
    return max(0, min(_meminfo("MemAvailable"), limit - used))


def others_memory(device: str) -> int:
    """Return the bytes of a GPU that other processes and CUDA itself hold, neither free nor our allocator's. Else 0."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return max(0, int(total - free) - torch.cuda.memory_reserved())


_SAID = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Texts of errors that are no `torch.OutOfMemoryError`: of the CPU, of CUDA (pinned memory), of its libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that memory has run out. A GPU's allocator says so by the error's type; CUDA, its
    libraries and the CPU's allocator in words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)


def _meminfo(field: str) -> int:
    """Return a field of Linux's memory table in bytes; elsewhere the C library's physical pages, else 4 GiB."""
    try:
        found = re.search(rf"^{field}:\s*(\d+) kB", _MEMORY_TABLE.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 * GIB


def _container_limit() -> tuple[int, int]:
    """Return the control group's memory limit and how much of it is taken (page cache that can go left out), in
    bytes. The limit is unbounded (2**62) outside of a container."""
    for limit_file, used_file, stat_file, inactive in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            limit = (_CONTROL_GROUPS / limit_file).read_text(encoding="ascii").strip()
            used = int((_CONTROL_GROUPS / used_file).read_text(encoding="ascii"))
            stat = (_CONTROL_GROUPS / stat_file).read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        reclaimable = re.search(rf"^{inactive} (\d+)", stat, re.MULTILINE)
        if limit.isdigit():
            return int(limit), used - (int(reclaimable[1]) if reclaimable is not None else 0)
    return 2**62, 0


def trim() -> None:
    """Hand unused memory back to the system, with the C library's free pages where that is glibc."""
    gc.collect()
    free_pages = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if free_pages is not None:
        free_pages(0)
