"""Time lines on disk: one file per case, for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from magis.errors import UsageError
from magis.report import trace_text, write_text_atomically
from magis.results import CaseResult
from pytest_magis.baseline_files import file_name
from pytest_magis.plan import PlannedCase

__all__ = ["trace_name", "write_trace"]


def trace_name(planned: PlannedCase) -> str:
    """The file of a case; "@" is in no part of it, so no two cases share one."""
    return f"{file_name(planned.model)}@{file_name(planned.label)}.json"


def write_trace(directory: Path, planned: PlannedCase, result: CaseResult) -> Path:
    """Write the time lines of a case. Raises UsageError where that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--magis-trace: cannot make {directory}: {error.strerror}") from error
    path = directory / trace_name(planned)
    write_text_atomically(path, trace_text(result))
    return path
