"""Files of a run: results.csv with columns of other projects, Pareto fronts, time lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from magis.errors import UsageError
from magis.report import Cell, front_svg, front_text, row_from_result, trace_text, write_csv, write_text_atomically
from magis.results import CaseResult
from pytest_magis.baseline_files import file_name
from pytest_magis.harness import search_front
from pytest_magis.outcome import Outcome
from pytest_magis.run_plan import PlannedCase


def row(outcome: Outcome, columns: Mapping[str, Callable[[CaseResult], Cell]]) -> dict[str, Cell]:
    """The row of a case; of one that failed before it had a result, only what was asked and the error."""
    if outcome.result is None:
        return {
            "name": outcome.model,
            "memory limit ratio": outcome.case.memory_ratio,
            "latency limit ratio": outcome.case.latency_ratio,
            "device": outcome.case.device,
            "preset": outcome.case.preset,
            "dtype": outcome.case.dtype,
            "strategy": outcome.case.strategy,
            "search": outcome.case.search,
            "verdict": outcome.verdict.label,
            "note": " ".join(outcome.error.split()),
        }
    found = [text for finding in outcome.verdict.findings for text in (finding.text, finding.why) if text]
    said = [*found, *outcome.verdict.notes]
    cells = row_from_result(outcome.result, verdict=outcome.verdict.label, note="; ".join(said))
    return cells | {name: compute(outcome.result) for name, compute in columns.items()}


def write_results(path: Path, outcomes: Iterable[Outcome], columns: Mapping[str, Callable[[CaseResult], Cell]]) -> str:
    """Replace `path` by the rows of this run, and say so in one line. Raises UsageError if it cannot be written."""
    rows = [row(outcome, columns) for outcome in outcomes]
    write_csv(path, rows)
    return f"results: {path} ({len(rows)} row{'s' if len(rows) != 1 else ''})"


# Fronts on disk: one pair of files per model.


def write_front(config: pytest.Config, directory: Path, planned: PlannedCase) -> str:
    """Search a model's front and write `<model>.json` and `<model>.svg`; one line that says so.

    Raises UsageError where the files cannot be written.
    """
    front = search_front(config, planned.model, planned.case)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--magis-pareto: cannot make {directory}: {error.strerror}") from error
    for suffix, text in (("json", front_text(front)), ("svg", front_svg(front))):
        write_text_atomically(directory / f"{planned.model}.{suffix}", text)
    return f"front: {directory / planned.model}.svg ({len(front.points)} plans, {front.states} judged)"


# Time lines on disk: one file per case, for Perfetto or chrome://tracing.


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
