"""The gate's options on the command line and in the ini file, checked before anything runs.

Every option is read as text and checked here, so that a mistake is one line and exit code 4, not a page of usage. In
the ini file an option has the same name with underscores (`magis_memory_ratios`); the command line wins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from magis.dtypes import check_dtype
from magis.errors import UsageError, nearest
from magis.strategies.strategy_names import SEARCHES
from magis.version_run import current_version_run, in_working_tree
from pytest_magis.findings import PERMISSIONS, Tolerances
from pytest_magis.flags import BY_NAME, DECISIONS, OPTIONS, given, in_ini, is_active, on_command_line, own_words
from pytest_magis.option_values import CACHES, READERS, Shard, choice, items, latency_ratios_of, memory_ratios_of
from pytest_magis.strategies import Grid

SUMMARY = "GITHUB_STEP_SUMMARY"
"""Environment variable with the file that GitHub shows as a job's summary."""
PROFILES = "profiles"
"""Folder of operator profiles, within that of the baselines."""
AGAINST: pytest.StashKey[Path] = pytest.StashKey()
WORKER_AGAINST = "magis_against"
"""Key of the results to compare with, in the input of a worker of pytest-xdist."""
MEMORY_RATIOS = (0.8, 0.6)
STRATEGIES = ("eager", "magis")
RANKS = 4


@dataclass(frozen=True)
class Settings:
    """Checked options of a run. `models` are patterns, still to be resolved."""

    models: tuple[str, ...]
    strategies: tuple[str, ...]
    grid: Grid
    baselines: Path
    against: str
    """Revision to compare with instead of stored baselines; empty: none."""
    updates: frozenset[str]
    prune: bool
    """True: remove baselines of tests that are gone."""
    csv: Path | None
    """File of the results; None in a run of users' tests alone that names none."""
    markdown: Path | None
    """File of the table as Markdown; None: none."""
    adds_markdown: bool
    """True if that file is GitHub's, to which every step of a job adds."""
    pareto: Path | None
    """Directory of Pareto fronts; None: none are asked for."""
    report: Path | None
    """File of the HTML report; None: none."""
    trace: Path | None
    """Directory of time lines; None: none are asked for."""
    benchmark_json: Path | None
    """File of latencies for pytest-benchmark; None: its own options decide."""
    resume: Path | None
    """Directory of finished pieces of searches; None: none."""
    tolerances: Tolerances
    shard: Shard | None
    """Share of the models to run; None: all."""
    only_gate: bool
    """True if models were named on the command line: without paths, nothing but the gate is collected."""
    given: tuple[tuple[str, str], ...]
    """Options on this command line: flag and value."""


def read_settings(config: pytest.Config, *, devices: Callable[[], Sequence[str]]) -> Settings:
    """Read and check all options. Raises magis.errors.UsageError.

    `devices` lists the devices that exist, the default one first; it is called only if needed, since finding a GPU
    takes seconds.
    """
    memory_ratios, latency_ratios = _ratios(config)
    searches = _list(config, "search") or SEARCHES[:1]
    for name in searches:
        choice(BY_NAME["search"].flag, "search", name, SEARCHES)
    slack = _read_option(config, "slack")
    device = _device(_scalar(config, "device"), devices)
    grid = Grid(
        device=device,
        preset=_read_option(config, "preset") or ("small" if device == "cpu" else "paper"),
        dtype=_dtype(config, device),
        memory_ratios=memory_ratios,
        memory_limit_of=_read_option(config, "memory-limit-of") or Grid.memory_limit_of,
        latency_ratios=latency_ratios,
        searches=searches,
        budget=_read_option(config, "budget"),
        seconds=_read_option(config, "seconds"),
        seed=_read_option(config, "seed") or 0,
        ranks=_read_option(config, "ranks") or RANKS,
        accumulate=_read_option(config, "accumulate") or Grid.accumulate,
        slack=Grid.slack if slack is None else slack,
    )
    _, resume = read_sharing(config)
    # read here, too, so that a mistake ends the run before its first case
    read_profiles(config)
    read_cache(config)
    _check_decisions(config)
    updates = frozenset(_list(config, "update") or ())
    for word in sorted(updates - set(PERMISSIONS)):
        raise UsageError(f"--magis-update: unknown {word!r}", hint=f"choose from {', '.join(PERMISSIONS)}")
    version_run = current_version_run()
    if version_run is not None:
        updates &= {"new"} if version_run.baselines else set()
    against = "" if version_run is not None else _scalar(config, "against") or ""
    given_markdown = _scalar(config, "markdown")
    markdown = given_markdown or os.environ.get(SUMMARY)
    words = {option.flag: on_command_line(config, option.name) for option in OPTIONS}
    return Settings(
        models=_list(config, "models") or (),
        strategies=_list(config, "strategies") or STRATEGIES,
        grid=grid,
        baselines=_version_results(config) or stored_baselines(config),
        against=against,
        updates=updates,
        prune=_read_option(config, "prune") or False,
        csv=_file(config, "csv") or (config.invocation_params.dir / "results.csv" if is_active(config) else None),
        markdown=config.invocation_params.dir / markdown if markdown else None,
        adds_markdown=given_markdown is None,
        pareto=_folder(config, "pareto"),
        report=_file(config, "report"),
        trace=_folder(config, "trace"),
        benchmark_json=_file(config, "benchmark-json"),
        resume=resume,
        tolerances=_tolerances(config),
        shard=_read_option(config, "shard"),
        only_gate=on_command_line(config, "models") is not None,
        given=tuple((flag, ",".join(texts)) for flag, texts in words.items() if texts is not None),
    )


def _check_decisions(config: pytest.Config) -> None:
    """Raise UsageError if `DECISIONS` stand anywhere but on the command line itself.

    There they would turn red into green in every run, in CI too.
    """
    if hasattr(config, "workerinput") or current_version_run() is not None:
        return  # their options come from another run
    for option in map(BY_NAME.__getitem__, DECISIONS):
        found = on_command_line(config, option.name) or []
        if found != own_words(config, option) or in_ini(config, option.name) is not None:
            raise UsageError(
                f"{option.flag} is given for every run, in the ini file, addopts, PYTEST_ADDOPTS or a file of options",
                hint="give it on the command line itself",
            )


def anywhere(config: pytest.Config) -> Settings:
    """Read the settings as if the asked device existed ("cpu" if none is asked for), without loading torch.

    Raises UsageError for a value that is wrong on every machine.
    """
    device = _scalar(config, "device")
    return read_settings(config, devices=lambda: ("cpu", device) if device else ("cpu",))


def read_sharing(config: pytest.Config) -> tuple[int, Path | None]:
    """Read the number of processes that share each search, and the directory of its finished pieces."""
    return _read_option(config, "processes") or 1, _folder(config, "resume")


def wants_timelines(config: pytest.Config) -> bool:
    """Return True if an output that shows steps call by call is asked for."""
    return _scalar(config, "report") is not None or _scalar(config, "trace") is not None


def read_cache(config: pytest.Config) -> str:
    """Read what pytest's cache keeps for the next run: "plans", "results" (and plans) or "none"."""
    return _read_option(config, "cache") or CACHES[0]


def read_profiles(config: pytest.Config) -> tuple[Path | None, Path | None]:
    """Read the named operator profile, or the folder that may have one for the device; the other is None.

    Raises UsageError if the named file does not exist.
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
    """Read the items of a list option, each once, in the order written; None if it was not given."""
    found = given(config, name)
    return None if found is None else items(BY_NAME[name].flag, found)


def _scalar(config: pytest.Config, name: str) -> str | None:
    found = given(config, name)
    if found is None:
        return None
    if not found[0].strip():
        raise UsageError(f"{BY_NAME[name].flag} is empty")
    return found[0].strip()


def _read_option(config: pytest.Config, name: str) -> Any:
    """Read an option that is no list by its entry in `READERS`; None if it was not given."""
    text = _scalar(config, name)
    return None if text is None else READERS[name](BY_NAME[name].flag, text)


def _ratios(config: pytest.Config) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read memory and latency ratios; if only latency ratios are given, there are no memory ratios.

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
    """Read tolerances; a given one for latency holds for timed and for simulated ones."""
    memory, latency = _read_option(config, "memory-tolerance"), _read_option(config, "latency-tolerance")
    strict = _read_option(config, "strict") or False
    return Tolerances(
        memory=Tolerances.memory if memory is None else memory,
        latency=Tolerances.latency if latency is None else latency,
        simulated_latency=Tolerances.simulated_latency if latency is None else latency,
        keeps_wins=strict,
        needs_limits=strict,
    )


def _dtype(config: pytest.Config, device: str) -> str | None:
    found: str | None = _read_option(config, "dtype")
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


def _version_results(config: pytest.Config) -> Path | None:
    """Return the folder with the figures of the version to compare with; in the run on that version, where it stores
    them. None without such a version."""
    version_run = current_version_run()
    place = version_run.baselines if version_run else getattr(config, "workerinput", {}).get(WORKER_AGAINST)
    return Path(place) if place else config.stash.get(AGAINST, None)


def stored_baselines(config: pytest.Config) -> Path:
    """Return the directory of baselines, relative to the working directory or, in the ini file, to rootdir."""
    given = _scalar(config, "baselines") or "baselines"
    start = config.rootpath if on_command_line(config, "baselines") is None else config.invocation_params.dir
    return _usable("--magis-baselines", start / given)


def _usable(flag: str, directory: Path) -> Path:
    """Check that a path is a directory, or is free for one."""
    try:
        usable = directory.is_dir() or not directory.exists()
    except OSError as error:
        raise UsageError(f"{flag}: {error.strerror}: {directory}") from error
    if not usable:
        raise UsageError(f"{flag}: {directory} is not a directory")
    return directory


def _folder(config: pytest.Config, name: str) -> Path | None:
    """Read a directory, which is made when something is written there; None if it was not given."""
    given = _scalar(config, name)
    return None if given is None else _usable(BY_NAME[name].flag, config.invocation_params.dir / given)


def _file(config: pytest.Config, name: str) -> Path | None:
    given = _scalar(config, name)
    return None if given is None else config.invocation_params.dir / given
