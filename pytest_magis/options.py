"""Parsing and checking of the gate's options from the command line and the ini file.

Every option is read as text, so that a mistake gives one line and exit code 4 instead of argparse's usage page. In the
ini file an option has the same name with underscores (`magis_memory_ratios`); the command line wins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magis.dtypes import check_dtype
from magis.errors import UsageError, nearest
from magis.version_run import current_version_run, in_working_tree
from pytest_magis.findings import Tolerances
from pytest_magis.flags import BY_NAME, GONE, OPTIONS, Settings, given, gone, in_ini, is_active, on_command_line
from pytest_magis.option_values import DIR

SUMMARY = "GITHUB_STEP_SUMMARY"
"""Environment variable with the path of GitHub's job summary."""
PROFILES = "profiles"
"""Name of the folder of operator profiles, inside the baselines folder."""
AGAINST: pytest.StashKey[Path] = pytest.StashKey()
WORKER_AGAINST = "magis_against"
"""Key in the input of a pytest-xdist worker: folder of the results to compare with."""
OF_PROJECT = ("baselines", "profile")
"""Path options that are relative to rootdir if set in the ini file; all others to the working directory."""
DECISIONS = (BY_NAME["update"], BY_NAME["prune"])
"""Options allowed only on the command line, since they are decisions about one run."""


def read_settings(config: pytest.Config, *, devices: Callable[[], Sequence[str]]) -> Settings:
    """Parse and check all options. Raises magis.errors.UsageError.

    `devices` lists the available devices, the default one first; it is called only if needed, since detecting a GPU
    takes seconds.
    """
    for key in gone(config):
        raise UsageError(f"--{key.replace('_', '-')} is gone", hint=f"give {GONE[key]}")
    asked: dict[str, Any] = {}
    for each in OPTIONS:
        texts = given(config, each.field)
        if texts is None:
            continue
        value = each.kind.value(each.flag, texts)
        if isinstance(value, Path) and (each.field, texts[0].strip()) != ("profile", "none"):
            of_project = each.field in OF_PROJECT and on_command_line(config, each.field) is None
            value = (config.rootpath if of_project else config.invocation_params.dir) / value
            if each.kind is DIR:
                _check_directory(each.flag, value)
        asked[each.field] = value
    # limits on the command line replace all those of the ini file, of either kind
    limits = ("memory_ratios", "latency_ratios")
    for source in (on_command_line, in_ini):
        if named := {name for name in limits if source(config, name) is not None}:
            asked |= {name: asked[name] if name in named else () for name in limits}
            break
    asked["device"] = device = _device(asked.get("device"), devices)
    asked.setdefault("preset", "small" if device == "cpu" else "paper")
    if "dtype" in asked:
        try:
            check_dtype(asked["dtype"], device)
        except UsageError as error:
            raise UsageError(f"{BY_NAME['dtype'].flag}: {error}") from None
    _check_decisions(config)
    written = [(each, on_command_line(config, each.field)) for each in OPTIONS]
    return Settings(
        **asked | _places(config, asked),
        only_gate=on_command_line(config, "models") is not None,
        given=tuple((each.flag, ",".join(texts)) for each, texts in written if texts is not None),
    )


def _places(config: pytest.Config, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paths that a run reads and writes; a run on another version, or against one, overrides those given."""
    version_run, start = current_version_run(), config.invocation_params.dir
    stored = asked.get("baselines", config.rootpath / "baselines")
    profile, profiles = asked.get("profile"), None
    if profile is None:
        profiles = in_working_tree(stored) / PROFILES
    elif str(profile) == "none":
        profile = None
    else:
        profile = in_working_tree(profile)
        if not profile.is_file():
            text = f"{BY_NAME['profile'].flag}: there is no file {profile}"
            raise UsageError(text, hint="record one with magis profile, or use none")
    update = frozenset(asked.get("update", ()))
    if version_run is not None:
        update &= {"new"} if version_run.baselines else frozenset()
    # figures of the version to compare with; in the run on that version, where it stores them
    measured = version_run.baselines if version_run else getattr(config, "workerinput", {}).get(WORKER_AGAINST)
    summary = os.environ.get(SUMMARY)
    return {
        "baselines": (Path(measured) if measured else config.stash.get(AGAINST, None)) or stored,
        "against": "" if version_run is not None else asked.get("against", ""),
        "update": update,
        "profile": profile,
        "profiles": profiles,
        "csv": asked.get("csv", start / "results.csv" if is_active(config) else None),
        "csv_full": asked.get("csv_full", False) or version_run is not None,
        "markdown": asked.get("markdown", start / summary if summary else None),
        "adds_markdown": "markdown" not in asked,
    }


def _check_decisions(config: pytest.Config) -> None:
    """Raise UsageError if an option of `DECISIONS` is given in any place other than the command line itself.

    Elsewhere it would accept findings in every run, in CI too.
    """
    if hasattr(config, "workerinput") or current_version_run() is not None:
        return  # their options come from another run
    for option in DECISIONS:
        # pytest adds words of `addopts`, of the environment and of files (`@options.txt`) to those written
        written, words = list[str](), iter(map(str, config.invocation_params.args))
        for word in words:
            if word == "--":
                break
            flag, equals, value = word.partition("=")
            if flag == option.flag:
                written.append(value if equals else next(words, "") if option.kind.metavar else "true")
        found = on_command_line(config, option.field) or []
        if found != written or in_ini(config, option.field) is not None:
            raise UsageError(
                f"{option.flag} is given for every run, in the ini file, addopts, PYTEST_ADDOPTS or a file of options",
                hint="give it on the command line itself",
            )


def anywhere(config: pytest.Config) -> Settings:
    """Parse the settings as if the given device ("cpu" by default) existed, without loading torch.

    Raises UsageError for a value that is invalid on every machine.
    """
    device = given(config, "device")
    return read_settings(config, devices=lambda: ("cpu", *(text.strip() for text in device or ())))


def tolerances_of(settings: Settings) -> Tolerances:
    """Return the tolerances of a run or a test; a given latency tolerance holds for timed and simulated latencies."""
    found = Tolerances(
        memory=settings.memory_tolerance,
        keeps_wins=settings.strict,
        needs_limits=settings.strict if settings.required is None else settings.required,
    )
    latency = settings.latency_tolerance
    return found if latency is None else replace(found, latency=latency, simulated_latency=latency)


def _device(asked: str | None, devices: Callable[[], Sequence[str]]) -> str:
    if asked == "cpu":
        return asked
    found = devices()
    if asked is None:
        return found[0]
    if asked in found:
        return asked
    if asked.startswith(("cuda", "gpu")) and "cuda" not in found:
        raise UsageError(f"--magis-device: {asked!r} needs a GPU and none was found", hint="use cpu or sim:<name>")
    raise UsageError(f"--magis-device: unknown device {asked!r}", hint=nearest(asked, found))


def _check_directory(flag: str, directory: Path) -> None:
    """Raise UsageError if a path exists and is not a directory."""
    try:
        usable = directory.is_dir() or not directory.exists()
    except OSError as error:
        raise UsageError(f"{flag}: {error.strerror}: {directory}") from error
    if not usable:
        raise UsageError(f"{flag}: {directory} is not a directory")
