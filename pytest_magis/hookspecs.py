"""Hooks by which other projects (or a conftest.py) add models, strategies, columns, or run cases themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """Return further strategies for `--magis-strategies`; their plugin runs their cases in `pytest_magis_run_case`."""


@pytest.hookspec
def pytest_magis_columns(config: pytest.Config) -> Mapping[str, Callable[[CaseResult], Cell]] | None:
    """Return further columns of results.csv: name (with unit and direction) -> function of a case's result."""


@pytest.hookspec(firstresult=True)
def pytest_magis_devices(config: pytest.Config) -> tuple[str, ...] | None:
    """Return the devices that cases can run on here, the default one first. The first answer counts."""


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
) -> CaseResult | None:
    """Run one case. The first answer counts; None leaves it to the next one, `magis.api.run_case` being the last.

    `planning_workspaces` (operator signature -> bytes) and `expected_graph` (digest) come from the baseline, so that
    the plan is the same on every machine; both are None without one. `latency_bounds` are the latency ratios at which
    the verdict changes: a timing that ends with one of them inside its interval decides nothing; `rough` says that the
    ratio is only shown, neither judged nor stored. `progress` takes a few words on what the case is doing,
    shown if that takes long; it may be None. `make` (seed -> workload) builds the network of a user's test, where the
    case's model is only a name; None: build the model by its name. `timelines` says whether
    `CaseResult.timelines` will be shown. Errors of magis fail the case in one line.
    Without a further implementation, models that magis cannot capture end the run before its first case; with one,
    they fail their case.
    """


@pytest.hookspec(firstresult=True)
def pytest_magis_front(case: Case, config: pytest.Config, make: Callable[[int], Workload] | None) -> ParetoFront | None:
    """Search a model's front of memory against latency (`--magis-pareto`); the case has no limit, and `make` is as in
    `pytest_magis_run_case`.

    The first answer counts; None leaves it to the next one, `magis.pareto` being the last.
    """
