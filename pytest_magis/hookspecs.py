"""Hooks for other plugins and conftest.py files: add models, strategies or csv columns, or run cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from magis.api import Workload
    from magis.report import Cell
    from magis.results import Case, CaseResult, ParetoFront
    from pytest_magis.strategies import Strategy


@pytest.hookspec
def pytest_magis_models(config: pytest.Config) -> Mapping[str, str] | None:
    """Return further models for `--magis-models`: name -> "package.module:factory" (see `magis.models`).

    A name consists of letters, digits, `_`, `-` and `.`; it is what node ids, baselines and results.csv show.
    """


@pytest.hookspec
def pytest_magis_strategies(config: pytest.Config) -> Iterable[Strategy]:  # type: ignore[empty-body]
    """Return further strategies for `--magis-strategies`; the same plugin runs them in `pytest_magis_run_case`."""


@pytest.hookspec
def pytest_magis_columns(config: pytest.Config) -> Mapping[str, Callable[[CaseResult], Cell]] | None:
    """Return further columns of results.csv: name (with unit and direction) -> function of a case's result."""


@pytest.hookspec(firstresult=True)
def pytest_magis_devices(config: pytest.Config) -> tuple[str, ...] | None:
    """Return the devices available for cases, the default one first. The first result wins."""


@pytest.hookspec(firstresult=True)
def pytest_magis_run_case(
    case: Case,
    config: pytest.Config,
    planning_workspaces: Mapping[str, int] | None,
    expected_graph: str | None,
    latency_bounds: tuple[float, ...],
    rough: bool,
    progress: Callable[[str], None] | None,
    make: Callable[[int], Workload] | None,
    timelines: bool,
    snapshots: Callable[[str], Path] | None,
) -> CaseResult | None:
    """Run one case. The first result wins; None passes the case on, finally to `magis.api.run_case`.

    `planning_workspaces` (operator signature -> bytes) and `expected_graph` (digest) come from the baseline, so that
    the plan is the same on every machine; both are None without a baseline. `latency_bounds` are the latency ratios at
    which the verdict changes: a timing whose interval contains one of them is inconclusive. `rough`: the ratio is only
    shown, neither judged nor stored. `progress`, if not None, takes a short text to show for a slow case. `make` (seed
    -> workload) builds the network of a user's test; None: build the case's model by name. `timelines`: fill
    `CaseResult.timelines`. `snapshots`, if not None, returns the file for a memory snapshot of the "original" or the
    "optimized" step. Errors of magis fail the case in one line. If no other plugin implements the hook, a model that
    magis cannot capture ends the run before its first case; else it fails its case.
    """


@pytest.hookspec(firstresult=True)
def pytest_magis_front(case: Case, config: pytest.Config, make: Callable[[int], Workload] | None) -> ParetoFront | None:
    """Search a model's Pareto front of memory against latency (`--magis-pareto`); the case has no limit.

    `make` (seed -> workload) builds the network of a user's test. The first result wins; None passes the case on,
    finally to `magis.pareto`.
    """
