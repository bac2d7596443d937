"""results.csv of a run: a row per outcome, with the columns that other projects add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from magis.report import Cell, row_from_result, write_csv
from magis.results import CaseResult
from pytest_magis.outcome import Outcome

__all__ = ["row", "write_results"]


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
