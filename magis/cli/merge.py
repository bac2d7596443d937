"""`magis merge`: the results of several machines as one file, and whether any case is red."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from magis.report import write_text_atomically
from magis.report.merged import case_name, merge_results

__all__ = ["add"]

DESCRIPTION = """
Join the results of runs that shared a list of models (--magis-shard), say how many cases are green and red, and name
the red ones. Exit code 1 if there is a red one, 4 for files that are no results or contradict each other.
"""
RED = 1


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = commands.add_parser("merge", help="join the results of several runs", description=DESCRIPTION)
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="results.csv of a run")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="where to write all rows (default: nowhere)")
    parser.set_defaults(run=_run)


def _run(asked: argparse.Namespace) -> int:
    merged = merge_results(asked.files)
    if asked.out is not None:
        write_text_atomically(asked.out, merged.text())
    for row in merged.red:
        said = f": {row['note']}" if row.get("note") else ""
        print(f"{row['verdict']}  {case_name(row)}{said}")  # noqa: T201
    count, red = len(merged.rows), len(merged.red)
    where = f"{asked.out}: " if asked.out is not None else ""
    print(f"{where}{count} cases of {len(asked.files)} files, {count - red} green, {red} red")  # noqa: T201
    return RED if red else 0
