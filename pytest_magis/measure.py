"""The seam to `magis.api`: the only place that the plugin measures through, and the only one that loads torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from magis.errors import MagisError
from magis.results import Case, CaseResult

if TYPE_CHECKING:
    from magis.api import Bench

__all__ = ["devices", "measure", "run_with_magis"]

_BENCH: pytest.StashKey[Bench] = pytest.StashKey()


def measure(
    config: pytest.Config,
    name: str,
    case: Case,
    planning: tuple[Mapping[str, int] | None, str | None],
    progress: Callable[[str], None] | None,
) -> CaseResult:
    """Run a case by hook and return its result, under the model's name. `planning` is what the baseline hands back.

    Warnings are reported, never raised: a project that turns its own into errors does not mean torch's.
    """
    workspaces, graph = planning
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = config.hook.pytest_magis_run_case(
            case=case, config=config, planning_workspaces=workspaces, expected_graph=graph, progress=progress
        )
    if not isinstance(result, CaseResult):
        raise MagisError(f"{name}: no plugin ran the case of strategy {case.strategy!r}")
    return replace(result, case=replace(result.case, model=name))


def run_with_magis(
    case: Case,
    config: pytest.Config,
    planning_workspaces: Mapping[str, int] | None,
    expected_graph: str | None,
    progress: Callable[[str], None] | None,
) -> CaseResult:
    """Run a case through `magis.api`; captures and eager measurements are kept for the process's further cases."""
    from magis.api import Bench, run_case

    if _BENCH not in config.stash:
        config.stash[_BENCH] = Bench()
    return run_case(
        case,
        cache=config.stash[_BENCH],
        planning_workspaces=planning_workspaces,
        expected_graph=expected_graph,
        progress=progress,
    )


def devices() -> tuple[str, ...]:
    """Every device that cases can run on here, the default one first."""
    from magis.api import available_devices, default_device

    first = default_device()
    return (first, *(name for name in available_devices() if name != first))
