"""Fronts on disk: one pair of files per model."""

from __future__ import annotations

from pathlib import Path

import pytest

from magis.errors import UsageError
from magis.report import front_svg, front_text, write_text_atomically
from pytest_magis.measure import search_front
from pytest_magis.plan import PlannedCase

__all__ = ["write_front"]


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
