"""The only module of the plugin that calls `magis.api` and thereby loads torch.

Its hooks are the plugin's own implementations; those of other plugins run first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from magis.errors import MagisError, StepGivenError
from magis.printable import warn
from magis.results import Case, CaseResult, ParetoFront
from pytest_magis.options import anywhere
from pytest_magis.strategies import BUILT_IN, Strategy

if TYPE_CHECKING:
    from magis.api import Bench, Workload

AGENTS: pytest.StashKey[Any] = pytest.StashKey()
"""Stash key: connections to processes that run ranks, if this session is rank 0 of a multi-process job."""
_BENCH: pytest.StashKey[Bench] = pytest.StashKey()


def measure(
    config: pytest.Config,
    name: str,
    case: Case,
    planning: tuple[Mapping[str, int] | None, str | None],
    bounds: tuple[float, ...],
    progress: Callable[[str], None] | None,
    make: Callable[[int], Workload] | None = None,
    *,
    rough: bool = False,
    snapshots: Callable[[str], Path] | None = None,
) -> CaseResult:
    """Run a case through `pytest_magis_run_case` and return its result, renamed to the model's name.

    `planning` are the baseline's workspaces and graph digest; `bounds` are the latency ratios at which the verdict
    changes; `rough`: the ratio is only shown, so a short timing is enough; `snapshots` names their files. Warnings
    are not raised as errors, even under `-W error`.
    """
    workspaces, graph = planning
    settings = anywhere(config)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = config.hook.pytest_magis_run_case(
            case=case,
            config=config,
            planning_workspaces=workspaces,
            expected_graph=graph,
            latency_bounds=bounds,
            rough=rough,
            progress=progress,
            make=make,
            timelines=settings.report is not None or settings.trace is not None,
            snapshots=snapshots,
        )
    if not isinstance(result, CaseResult):
        raise MagisError(f"{name}: no plugin ran the case of strategy {case.strategy!r}")
    return replace(result, case=replace(result.case, model=name))


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
    snapshots: Callable[[str], Path] | None,
) -> CaseResult:
    """Run a case that no other plugin ran; cases of one process share captures and eager measurements."""
    from magis.api import run_case, step_case

    try:
        return run_case(
            case,
            cache=_bench(config),
            make=make,
            planning_workspaces=planning_workspaces,
            expected_graph=expected_graph,
            latency_bounds=latency_bounds,
            rough=rough,
            progress=progress,
            timelines=timelines,
            growing=True,
            snapshots=snapshots,
        )
    except StepGivenError:
        if make is None:
            raise
        return step_case(case, make, _bench(config), snapshots, timelines=timelines)


def measure_again(config: pytest.Config, case: Case) -> None:
    """Drop the cached result of a red case, so that a rerun measures again."""
    if _BENCH in config.stash:
        config.stash[_BENCH].measure_again(case)


def search_front(
    config: pytest.Config, name: str, case: Case, make: Callable[[int], Workload] | None = None
) -> ParetoFront:
    """Search a model's Pareto front through `pytest_magis_front` and return it, renamed to the model's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        front = config.hook.pytest_magis_front(case=case, config=config, make=make)
    if not isinstance(front, ParetoFront):
        raise MagisError(f"{name}: no plugin searched the front")
    return replace(front, model=name)


@pytest.hookimpl(trylast=True)
def pytest_magis_front(case: Case, config: pytest.Config, make: Callable[[int], Workload] | None) -> ParetoFront:
    """Search a Pareto front that no other plugin searched, reusing captures of this process."""
    from magis.api import pareto

    return pareto(
        case.model,
        device=case.device,
        preset=case.preset,
        dtype=case.dtype,
        seed=case.seed,
        budget=case.budget,
        seconds=case.seconds,
        slack=case.slack,
        cache=_bench(config),
        make=make,
    )


def check_with_magis(
    case: Case,
    config: pytest.Config,
    *,
    keep: bool,
    make: Callable[[int], Workload] | None = None,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Check that magis can capture a case's model; `keep` caches the capture for cases that run in this process."""
    from magis.api import check_case

    try:
        check_case(case, cache=_bench(config) if keep else None, make=make, progress=progress)
    except StepGivenError:
        if make is None:
            raise  # a factory; of a test, the case itself looks at the step


def builder(name: str, function: Callable[[], object], optimizer: object) -> Callable[[int], Workload]:
    """Return a function (seed -> workload) that builds the network that a test function returns."""
    from magis.models import from_function

    return from_function(name, function, optimizer)


def forget(config: pytest.Config) -> None:
    """Free all cached captures and measurements."""
    if _BENCH in config.stash:
        config.stash[_BENCH].forget()


def check_prices(case: Case, config: pytest.Config) -> None:
    """Raise UsageError if the operator profile in use does not fit the case."""
    from magis.api import check_profile

    check_profile(case, cache=_bench(config))


def runs_every_case(config: pytest.Config) -> bool:
    """Return True if no other plugin implements the hooks that run cases and search fronts."""
    hooks = (config.hook.pytest_magis_run_case, config.hook.pytest_magis_front)
    return all(len(hook.get_hookimpls()) == 1 for hook in hooks)


def _bench(config: pytest.Config) -> Bench:
    from magis.api import Bench, Profiles

    if _BENCH not in config.stash:
        settings = anywhere(config)
        config.stash[_BENCH] = Bench(
            processes=settings.processes,
            resume=settings.resume,
            profiles=Profiles(settings.profile, settings.profiles),
            kept=_cache(config),
            keep_results=settings.cache == "results",
            agents=config.stash.get(AGENTS, None),
        )
        config.add_cleanup(config.stash[_BENCH].close)  # ranks, if any were started
    return config.stash[_BENCH]


def _cache(config: pytest.Config) -> Path | None:
    """Return a folder in pytest's cache; None if caching is off, or pytest has no cache (-p no:cacheprovider)."""
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if cache is None or anywhere(config).cache == "none":
        return None
    try:
        return cache.mkdir("magis")
    except OSError as error:
        text = f"nothing is kept for the next run: no folder in pytest's cache: {error.strerror or error}"
        warn(text, RuntimeWarning, stacklevel=2)
        return None


@pytest.hookimpl(trylast=True)
def pytest_magis_devices() -> tuple[str, ...]:
    """Return all devices available here, the default one first."""
    from magis.api import available_devices, default_device

    first = default_device()
    return (first, *(name for name in available_devices() if name != first))


@pytest.hookimpl(trylast=True)
def pytest_magis_strategies() -> Iterable[Strategy]:
    """Return the built-in strategies."""
    return BUILT_IN
