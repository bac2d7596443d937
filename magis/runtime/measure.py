"""Exact peak memory of a callable, and the identity of the device.

On the CPU, peaks come from the allocator's event log, which `torch.profiler` keeps: every allocation and every free
with its address, workspaces of operators included. Resident-set sizes are no substitute (the C library keeps freed
pages). Three traps, seen on torch 2.13:

* A free of a tensor that is older than the window may or may not be logged (the allocator remembers addresses
  from earlier profiles only), so frees of addresses that were not allocated in the window are ignored: the
  result is the peak *above the window's start* as if older tensors stayed.
* The log is a tree of operators with a branch per thread: it is flattened and ordered by time.
* Starting and stopping the profiler prints `USDT:` lines from C++, out of reach of `sys.stderr`.

Tensors without workspaces are tracked by a dispatch mode with weak references to storages, in a separate run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from magis.cost.cards import CONTEXT_BYTES
from magis.cost.devices import CONSTANTS_VERSION, find_device
from magis.ops.eager_only import formulas_as_eager
from magis.ops.generators import states_recorded
from magis.quiet import collector_off
from magis.runtime.storage_ledger import StorageLedger
from magis.units import GIB

_MEMORY_TABLE = Path("/proc/meminfo")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_NOISE = (
    b"USDT:",
    b"Memory block of unknown size was allocated before the profiling started",
    b"disableProfiler called but no active profiling session found",
    b"gpuGetDeviceCount failed",  # a build for CUDA on a machine without a driver
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocator event at `time_ns` nanoseconds after an arbitrary start; negative `nbytes` are a free."""

    time_ns: int
    address: int
    nbytes: int
    op: str = ""
    """Name of the operator that it happens in."""


@dataclass(frozen=True, slots=True)
class WindowPeak:
    """Bytes allocated in a window above its start: at the peak, and at the end."""

    peak_bytes: int
    kept_bytes: int
    reserved_bytes: int | None = None
    """Peak reserved by CUDA's caching allocator, above the bytes allocated at the start; None on a CPU."""


def window_peak(fn: Callable[[], object], device: torch.device | str = "cpu") -> WindowPeak:
    """Run `fn` once and return its peak of allocated bytes above the start, workspaces of operators included.

    The result of `fn` stays alive until the window ends. On CUDA the caching allocator's own counters are read after a
    reset (blocks rounded to 512 bytes), with nothing cached at the start; there, freeing a tensor that is older than
    the window lowers the peak, which it does not on the CPU: free none.
    """
    where = torch.device(device)
    if where.type != "cuda":
        with memory_profile() as window:
            kept = fn()
        peak = replay(allocations(window))
        del kept  # alive until the log is closed
        return peak
    gc.collect()
    torch.cuda.synchronize(where)
    torch.cuda.empty_cache()  # cached blocks of earlier steps would count as reserved
    torch.cuda.reset_peak_memory_stats(where)
    start = torch.cuda.memory_allocated(where)
    kept = fn()
    torch.cuda.synchronize(where)
    peak = WindowPeak(
        torch.cuda.max_memory_allocated(where) - start,
        torch.cuda.memory_allocated(where) - start,
        torch.cuda.max_memory_reserved(where) - start,
    )
    del kept
    return peak


def replay(events: Iterable[Allocation], older: Mapping[int, int] | None = None) -> WindowPeak:
    """Return the peak of live bytes over `events` in the order given, and the live bytes at the end. ``older`` bytes by
    address are alive at the start, and count if they are freed in the window. A free of any other address that no
    earlier event allocated is older than the window and does not count."""
    events, older = list(events), older or {}
    touched = {event.address for event in events}
    live = {address: nbytes for address, nbytes in older.items() if address in touched}
    now = peak = sum(live.values())
    for event in events:
        if event.nbytes < 0:
            now -= live.pop(event.address, 0)
        else:
            # an address that occurs twice was freed in between, outside of the log
            now += event.nbytes - live.get(event.address, 0)
            live[event.address] = event.nbytes
            peak = max(peak, now)
    return WindowPeak(peak, now)


@contextmanager
def collector_spared(*, collect: bool = True) -> Iterator[None]:
    """Exclude objects that exist before the block (modules, graphs, torch itself) from garbage collection in the block.
    Measuring collects before every window, and would spend most time on objects that live as long as the process.
    Existing garbage is collected first, unless ``collect`` is False."""
    if gc.get_freeze_count():  # frozen by other code: unfreeze would undo that, too
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
    """Collect garbage now, and in the block only on request: otherwise the death of cycles depends on earlier code."""
    gc.collect()
    with collector_off():
        yield


@contextmanager
def memory_profile() -> Iterator[profile]:
    """Log the CPU allocator's events in the block, without the profiler's output; read the log with `allocations`. The
    garbage collector runs before the block and is off inside it, so that the peak does not depend on earlier code."""
    with no_collection(), quiet_profiler(), profile(profile_memory=True) as log:
        yield log


def logged(log: profile) -> Iterator[Any]:
    """Yield all nodes of a finished `memory_profile`, depth first."""
    results: Any = log.kineto_results
    pending = list(reversed(results.experimental_event_tree()))
    while pending:
        node = pending.pop()
        pending.extend(reversed(node.children))
        yield node


def allocations(log: profile) -> list[Allocation]:
    """Return the CPU allocator's events in a finished `memory_profile`, sorted by time, then by order in the log."""
    found = [
        Allocation(
            node.start_time_ns, node.typed[1].ptr, node.typed[1].alloc_size, node.parent.name if node.parent else ""
        )
        for node in logged(log)
        if node.typed[0].name == "Allocation" and node.typed[1].device.type == "cpu"
    ]
    return sorted(found, key=lambda event: event.time_ns)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Filter the profiler's own lines from stdout and stderr; all other output appears at the end of the block. C++
    writes these lines to the file descriptors, which are therefore redirected to temporary files."""
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


def tensor_peak(fn: Callable[[], object]) -> int:
    """Run `fn` once and return the peak bytes of the tensors that it makes, above the start, without workspaces.

    After every operator, with its inputs and outputs alive, the bytes of all storages made since the start are summed,
    each storage once. The peak is equal on all devices whose kernels keep to declared shapes and strides. Tensors
    without a storage (sparse ones) are not counted.
    """
    ledger = StorageLedger()
    # A GPU generator's states are in host memory, which is not counted.
    states = nullcontext() if torch.cuda.is_initialized() else states_recorded("cpu", {})
    with no_collection():
        with formulas_as_eager(), states, ledger:
            kept = fn()
        del kept
    return ledger.peak_bytes


def device_identity(device: str) -> dict[str, str]:
    """Return the conditions for which workspaces and times of `device` are valid; figures are compared if these are
    equal. "cpu": instruction set of the kernels, number of threads, torch version, and oneDNN settings, if any. "cuda":
    GPU, torch and CUDA version. "sim:<name>": version of the device constants. Raises UnknownDevice for other names."""
    if device == "cpu":
        # settings that change oneDNN's choice of kernels, as one entry
        backend: Any = torch.backends.mkldnn  # torch's stubs lack some attributes
        told = [f"{name}={os.environ.get(f'ONEDNN_{name}') or os.environ.get(f'DNNL_{name}')}" for name in _ONEDNN]
        settings = [each for each in told if not each.endswith("=None")]
        settings += [] if backend.enabled else ["off"]
        settings += sorted({each.fp32_precision for each in (backend.conv, backend.matmul)} - {"none", "ieee"})
        return {
            "device": "cpu",
            "instruction set": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "torch": str(torch.__version__),
            **({"oneDNN": " ".join(settings)} if settings else {}),
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
"""Environment variables that select oneDNN's kernels, and so their workspaces; each has an older name, too."""


def device_memory(device: str) -> int:
    """Return the memory of `device` in bytes, as CUDA reports it for a GPU: of the machine or its container for "cpu",
    a constant for "sim:<name>"."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    if device != "cpu":
        return find_device(device).memory_bytes
    return min(_meminfo("MemTotal"), _container_limit()[0])


def usable_memory(device: str) -> int:
    """Return the bytes of `device` without what other processes and CUDA itself use."""
    if device in ("cpu", "cuda"):
        return device_memory(device) - others_memory(device)
    return device_memory(device) - CONTEXT_BYTES


def free_device_memory(device: str) -> int:
    """Return the bytes that a step can allocate on `device`; a simulated device is empty but for CUDA's context."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + cached
    if device != "cpu":
        return usable_memory(device)
    limit, used = _container_limit()
    return max(0, min(_meminfo("MemAvailable"), limit - used))


def others_memory(device: str) -> int:
    """Return the bytes of a GPU that other processes and CUDA itself use; 0 for other devices."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return max(0, int(total - free) - torch.cuda.memory_reserved())


_SAID = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Texts of out-of-memory errors that are no `torch.OutOfMemoryError`: of the CPU, CUDA (pinned memory), its
libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error: by its type if a GPU's allocator raised it, by its text if CUDA, its
    libraries or the CPU's allocator did."""
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
    """Return the control group's memory limit and its used bytes without reclaimable page cache; the limit is 2**62
    bytes outside of a container."""
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
    """Return unused memory to the system, with the C library's free pages if it is glibc."""
    gc.collect()
    free_pages = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if free_pages is not None:
        free_pages(0)
