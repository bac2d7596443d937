"""Timelines of steps, as files."""

from __future__ import annotations

from pathlib import Path

import torch

from magis.backend.steps import Step, whole_step
from magis.backend.trace import chrome_trace
from magis.report.files import check_writable, write_bytes_atomically

__all__ = ["write_trace"]


def write_trace(path: Path, step: Step, device: torch.device | str = "cpu") -> None:
    """Run a step and write what happened when, for Perfetto or chrome://tracing: JSON, in place in one step.

    Weights change as by three steps: two go before the one that is traced. Raises UsageError, before anything runs,
    for a path that cannot be written.
    """
    check_writable(path)
    write_bytes_atomically(path, chrome_trace(whole_step(step), device))
