"""The plugin's own answers to its hooks; other plugins are asked first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import pytest

from magis.results import Case, CaseResult, ParetoFront
from pytest_magis.harness import devices, front_with_magis, run_with_magis
from pytest_magis.strategies import BUILT_IN, Strategy

if TYPE_CHECKING:
    from magis.api import Workload


@pytest.hookimpl(trylast=True)
def pytest_magis_strategies() -> Iterable[Strategy]:
    """The strategies that come with the plugin."""
    return BUILT_IN


@pytest.hookimpl(trylast=True)
def pytest_magis_devices() -> tuple[str, ...]:
    """The devices that magis finds here."""
    return devices()


@pytest.hookimpl(trylast=True)
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
) -> CaseResult:
    """Run a case that no other plugin wanted to run."""
    return run_with_magis(
        case,
        config,
        planning_workspaces,
        expected_graph,
        progress,
        latency_bounds,
        make,
        rough=rough,
        timelines=timelines,
    )


@pytest.hookimpl(trylast=True)
def pytest_magis_front(case: Case, config: pytest.Config) -> ParetoFront:
    """Search a front that no other plugin wanted to search."""
    return front_with_magis(case, config)
