"""A step as a timeline for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from magis.backend.measure import quiet_profiler

__all__ = ["chrome_trace"]


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
