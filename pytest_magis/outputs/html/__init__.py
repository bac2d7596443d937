"""The report of a run: one HTML file that opens offline, with nothing fetched from anywhere."""

from __future__ import annotations

from pathlib import Path

from magis.report import write_text_atomically
from pytest_magis.outputs.html.page import html_text
from pytest_magis.outputs.html.page_parts import Run

__all__ = ["Run", "html_text", "write_report"]


def write_report(path: Path, run: Run) -> str:
    """Replace the file by the report, and say so in one line. Raises UsageError where that fails."""
    write_text_atomically(path, html_text(run))
    return f"report: {path}"
