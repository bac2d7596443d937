"""What a report is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_magis.baselines import ModelBaseline
from pytest_magis.options import Settings
from pytest_magis.outcome import Outcome

__all__ = ["Run"]


@dataclass(frozen=True)
class Run:
    """A run at its end."""

    outcomes: tuple[Outcome, ...]
    planned: int
    """Cases that were chosen; fewer outcomes: the run ended early."""
    settings: Settings
    interrupted: bool
    fronts: tuple[tuple[str, Path], ...]
    """Model and picture of each front that this run wrote."""
    baselines: Mapping[Path, ModelBaseline | None]
    """As they were when the run began."""
