"""The gate's options on the command line and in the ini file, checked before anything runs.

Every option is read as text and checked here, so that a mistake is one line and exit code 4 rather than a page of
usage. In the ini file an option has the same name with underscores (`magis_memory_ratios`); the command line wins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from magis.dtypes import check_dtype
from magis.errors import UsageError, nearest
from magis.strategies.strategy_names import SEARCHES
from magis.version_run import in_working_tree, told
from pytest_magis.findings import PERMISSIONS, Tolerances
from pytest_magis.flags import BY_NAME, DECISIONS, OPTIONS, given, in_ini, is_active, on_command_line, own_words
from pytest_magis.option_values import CACHES, READERS, Shard, choice, items, latency_ratios_of, memory_ratios_of
from pytest_magis.strategies import Grid

SUMMARY = "GITHUB_STEP_SUMMARY"
"""Names the file that GitHub shows as a job's summary."""
PROFILES = "profiles"
"""The folder of operator profiles, among those of the baselines."""
AGAINST: pytest.StashKey[Path] = pytest.StashKey()
WORKER_AGAINST = "magis_against"
"""What a worker of pytest-xdist is told."""
MEMORY_RATIOS = (0.8, 0.6)
STRATEGIES = ("eager", "magis")
RANKS = 4


@dataclass(frozen=True)
class Settings:
    """What a run was asked to do; checked. `models` are patterns, still to be resolved."""

    models: tuple[str, ...]
    strategies: tuple[str, ...]
    grid: Grid
    baselines: Path
    against: str
    """The revision whose results are there in the place of stored ones; empty: none."""
    updates: frozenset[str]
    prune: bool
    """Whether baselines of tests that are gone are removed."""
    csv: Path | None
    """Where the results go; None: nowhere, in a run of users' tests alone that does not name a file."""
    markdown: Path | None
    """Where the table goes as Markdown; None: nowhere."""
    adds_markdown: bool
    """Whether that file is GitHub's, to which every step of a job adds."""
    pareto: Path | None
    """Where fronts are written; None: they are not asked for."""
    report: Path | None
    """Where the HTML report goes; None: nowhere."""
    trace: Path | None
    """The directory of the time lines; None: they are not asked for."""
    benchmark_json: Path | None
    """Where pytest-benchmark writes the latencies; None: where its own options say."""
    resume: Path | None
    """Where finished pieces of searches are kept; None: nowhere."""
    tolerances: Tolerances
    shard: Shard | None
    """Which share of the models is run; None: all."""
    only_gate: bool
    """Models were named on the command line: without paths, nothing but the gate is collected."""
    given: tuple[tuple[str, str], ...]
    """Options of this command line: flag and value."""


def read_settings(config: pytest.Config, *, devices: Callable[[], Sequence[str]]) -> Settings:
    """The checked settings. Raises magis.errors.UsageError in one line for whatever is wrong.

    `devices` lists the devices that exist, the default one first; it is asked only if needed, since finding a GPU
    takes seconds.
    """
    memory_ratios, latency_ratios = _ratios(config)
    device = _device(_scalar(config, "device"), devices)
    grid = Grid(
        device=device,
        preset=_read(config, "preset") or ("small" if device == "cpu" else "paper"),
        dtype=_dtype(config, device),
        memory_ratios=memory_ratios,
        memory_limit_of=_read(config, "memory-limit-of") or Grid.memory_limit_of,
        latency_ratios=latency_ratios,
        searches=_searches(config),
        budget=_read(config, "budget"),
        seconds=_read(config, "seconds"),
        seed=_read(config, "seed") or 0,
        ranks=_read(config, "ranks") or RANKS,
        accumulate=_read(config, "accumulate") or Grid.accumulate,
        slack=_slack(config),
    )
    _, resume = read_sharing(config)
    read_profiles(config)  # a slip of the hand is told at once
    read_cache(config)
    _check_decisions(config)
    updates = frozenset(_list(config, "update") or ())
    for word in sorted(updates - set(PERMISSIONS)):
        raise UsageError(f"--magis-update: unknown {word!r}", hint=f"choose from {', '.join(PERMISSIONS)}")
    version_run = told()
    if version_run is not None:
        updates &= {"new"} if version_run.baselines else set()
    against = "" if version_run is not None else _scalar(config, "against") or ""
    given_markdown = _scalar(config, "markdown")
    markdown = given_markdown or os.environ.get(SUMMARY)
    return Settings(
        models=_list(config, "models") or (),
        strategies=_list(config, "strategies") or STRATEGIES,
        grid=grid,
        baselines=_compared(config) or stored_baselines(config),
        against=against,
        updates=updates,
        prune=_read(config, "prune") or False,
        csv=_file(config, "csv") or (config.invocation_params.dir / "results.csv" if is_active(config) else None),
        markdown=config.invocation_params.dir / markdown if markdown else None,
        adds_markdown=given_markdown is None,
        pareto=_folder(config, "pareto"),
        report=_file(config, "report"),
        trace=_folder(config, "trace"),
        benchmark_json=_file(config, "benchmark-json"),
        resume=resume,
        tolerances=_tolerances(config),
        shard=_read(config, "shard"),
        only_gate=on_command_line(config, "models") is not None,
        given=tuple(_given(config)),
    )


def _check_decisions(config: pytest.Config) -> None:
    """Raise UsageError where what one command line may decide is decided for every run: it would turn red into
    green, in CI too."""
    if hasattr(config, "workerinput") or told() is not None:
        return  # these are told what to store
    for option in map(BY_NAME.__getitem__, DECISIONS):
        found = on_command_line(config, option.name) or []
        if found != own_words(config, option) or in_ini(config, option.name) is not None:
            raise UsageError(
                f"{option.flag} is given for every run, in the ini file, addopts, PYTEST_ADDOPTS or a file of options",
                hint="give it on the command line itself",
            )


def _slack(config: pytest.Config) -> float:
    found: float | None = _read(config, "slack")
    return Grid.slack if found is None else found


def _searches(config: pytest.Config) -> tuple[str, ...]:
    found = _list(config, "search") or SEARCHES[:1]
    for name in found:
        choice(BY_NAME["search"].flag, "search", name, SEARCHES)
    return found


def anywhere(config: pytest.Config) -> Settings:
    """The settings as they are where the device that is asked for exists; "cpu" where none is.

    Loads no torch. Raises UsageError for a value that is wrong on every machine.
    """
    device = _scalar(config, "device")
    return read_settings(config, devices=lambda: ("cpu", device) if device else ("cpu",))


def read_sharing(config: pytest.Config) -> tuple[int, Path | None]:
    """How many processes share each search, and where its finished pieces are kept."""
    return _read(config, "processes") or 1, _folder(config, "resume")


def wants_timelines(config: pytest.Config) -> bool:
    """Whether anything is asked for that shows steps call by call."""
    return _scalar(config, "report") is not None or _scalar(config, "trace") is not None


def read_cache(config: pytest.Config) -> str:
    """What is kept for the next run: "plans", "results" (and plans) or "none"."""
    return _read(config, "cache") or CACHES[0]


def read_profiles(config: pytest.Config) -> tuple[Path | None, Path | None]:
    """The operator profile that was named, and else the folder in which there may be one for the device.

    Raises UsageError if the file that was named is not there.
    """
    given = _scalar(config, "profile")
    if given is None:
        return None, in_working_tree(stored_baselines(config)) / PROFILES
    if given == "none":
        return None, None
    start = config.rootpath if on_command_line(config, "profile") is None else config.invocation_params.dir
    path = in_working_tree(start / given)
    if not path.is_file():
        raise UsageError(f"--magis-profile: there is no file {path}", hint="record one with magis profile, or use none")
    return path, None


def _list(config: pytest.Config, name: str) -> tuple[str, ...] | None:
    """A list option's items, each once, in the order written; None if it was not given."""
    found = given(config, name)
    return None if found is None else items(BY_NAME[name].flag, found)


def _scalar(config: pytest.Config, name: str) -> str | None:
    found = given(config, name)
    if found is None:
        return None
    if not found[0].strip():
        raise UsageError(f"{BY_NAME[name].flag} is empty")
    return found[0].strip()


def _read(config: pytest.Config, name: str) -> Any:
    """What an option that is no list was given, by its reader; None if it was not."""
    text = _scalar(config, name)
    return None if text is None else READERS[name](BY_NAME[name].flag, text)


def _ratios(config: pytest.Config) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Memory and latency ratios. Where only latency ratios are given there are no memory ratios.

    Limits on the command line replace all those of the ini file, whichever kind they are.
    """
    for source in (on_command_line, in_ini):
        memory, latency = source(config, "memory-ratios"), source(config, "latency-ratios")
        if memory is not None or latency is not None:
            return (
                memory_ratios_of(BY_NAME["memory-ratios"].flag, memory) if memory is not None else (),
                latency_ratios_of(BY_NAME["latency-ratios"].flag, latency) if latency is not None else (),
            )
    return MEMORY_RATIOS, ()


def _tolerances(config: pytest.Config) -> Tolerances:
    """The defaults but for what was given; one for latency holds for timed and for simulated ones."""
    memory, latency = _read(config, "memory-tolerance"), _read(config, "latency-tolerance")
    strict = _read(config, "strict") or False
    return Tolerances(
        memory=Tolerances.memory if memory is None else memory,
        latency=Tolerances.latency if latency is None else latency,
        simulated_latency=Tolerances.simulated_latency if latency is None else latency,
        keeps_wins=strict,
        needs_limits=strict,
    )


def _dtype(config: pytest.Config, device: str) -> str | None:
    found: str | None = _read(config, "dtype")
    if found is not None:
        try:
            check_dtype(found, device)
        except UsageError as error:
            raise UsageError(f"{BY_NAME['dtype'].flag}: {error}") from None
    return found


def _device(text: str | None, devices: Callable[[], Sequence[str]]) -> str:
    if text == "cpu":
        return text
    found = devices()
    if text is None:
        return found[0]
    if text in found:
        return text
    if text == "cuda":
        raise UsageError("--magis-device: 'cuda' needs a GPU and none was found", hint="use cpu or sim:<name>")
    raise UsageError(f"--magis-device: unknown device {text!r}", hint=nearest(text, found))


def _compared(config: pytest.Config) -> Path | None:
    """Where the results of the version lie that the run is compared with, on a worker as it was told; in the run on
    that version, where they will."""
    version_run = told()
    place = version_run.baselines if version_run else getattr(config, "workerinput", {}).get(WORKER_AGAINST)
    return Path(place) if place else config.stash.get(AGAINST, None)


def stored_baselines(config: pytest.Config) -> Path:
    """The directory of the baselines; on the command line relative to where pytest was started, else to the rootdir."""
    given = _scalar(config, "baselines") or "baselines"
    start = config.rootpath if on_command_line(config, "baselines") is None else config.invocation_params.dir
    return _usable("--magis-baselines", start / given)


def _usable(flag: str, directory: Path) -> Path:
    """A directory, or a place where one can be."""
    try:
        usable = directory.is_dir() or not directory.exists()
    except OSError as error:
        raise UsageError(f"{flag}: {error.strerror}: {directory}") from error
    if not usable:
        raise UsageError(f"{flag}: {directory} is not a directory")
    return directory


def _folder(config: pytest.Config, name: str) -> Path | None:
    """A directory that is made when something is written there; None if it was not given."""
    given = _scalar(config, name)
    return None if given is None else _usable(BY_NAME[name].flag, config.invocation_params.dir / given)


def _file(config: pytest.Config, name: str) -> Path | None:
    given = _scalar(config, name)
    return None if given is None else config.invocation_params.dir / given


def _given(config: pytest.Config) -> Iterator[tuple[str, str]]:
    for option in OPTIONS:
        given = on_command_line(config, option.name)
        if given is not None:
            yield option.flag, ",".join(given)
