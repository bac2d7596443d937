"""`python -m pytest_magis.store_outcomes FILE`: stores outcomes of a run as baselines, for `magis rebase`.

Each line of the file is a JSON list of a baseline's path and an outcome. Exit code 4, with one line, if a baseline
cannot be read or written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from magis.errors import MagisError
from magis.report import check_writable
from pytest_magis.gate import store
from pytest_magis.run_plan import Outcome


def store_all(lines: Iterable[str]) -> None:
    """Store outcomes in their baseline files. Raises MagisError, before any file changes, if one cannot be written."""
    by_file: dict[Path, list[Outcome]] = {}
    for path, text in map(json.loads, lines):
        by_file.setdefault(Path(path), []).append(Outcome.from_text(text))
    for path in by_file:
        check_writable(path)
    for path, outcomes in by_file.items():
        store(path, outcomes)


if __name__ == "__main__":
    try:
        store_all(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    except MagisError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        sys.exit(pytest.ExitCode.USAGE_ERROR)
