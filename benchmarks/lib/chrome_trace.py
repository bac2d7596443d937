"""A step as a timeline for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from magis.report.text_store import check_writable, write_bytes_atomically
from magis.runtime.measure import quiet_profiler
from magis.runtime.steps import Step, whole_step

__all__ = ["chrome_trace", "write_trace"]


def write_trace(path: Path, step: Step, device: torch.device | str = "cpu") -> None:
    """Run a step and write what happened when, for Perfetto or chrome://tracing: JSON, in place in one step.

    Weights change as by three steps: two go before the one that is traced. Raises UsageError, before anything runs,
    for a path that cannot be written.
    """
    check_writable(path)
    write_bytes_atomically(path, chrome_trace(whole_step(step), device))


def chrome_trace(run: Callable[[], object], device: torch.device | str = "cpu", *, warm_up: int = 2) -> bytes:
    """A Chrome trace (JSON) of one call of ``run`` after ``warm_up`` untraced ones.

    Operators with their shapes; on CUDA the kernels and copies of every stream besides, up to the last one.
    """
    where = torch.device(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if where.type == "cuda" else [])]
    for _ in range(warm_up):
        run()
    _synchronize(where)
    with quiet_profiler(), tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities, record_shapes=True) as log:
            run()
            _synchronize(where)
        path = Path(folder) / "trace.json"
        log.export_chrome_trace(str(path))
        return path.read_bytes()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
