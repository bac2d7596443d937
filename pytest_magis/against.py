"""`--magis-against`: another version is measured first, and takes the place of stored baselines.

The version is a revision of the project, or this environment with other releases ("torch==2.12.0"). A child process
runs the same tests there, on the same machine, and stores what it measures in a folder of this run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from magis.errors import UsageError
from magis.versions import (
    COMPARED_WITH,
    STRAYS,
    GateRun,
    checkout,
    environment_of,
    is_requirement,
    repository,
    resolved,
    run_gate,
)
from pytest_magis.flags import BY_NAME
from pytest_magis.options import AGAINST, Settings, anywhere, stored_baselines

FLAG = BY_NAME["against"].flag
FILES = ("report", "benchmark-json", "pareto", "trace", "resume")
"""Options that name what a run writes, besides those that every child is given."""


def compare(config: pytest.Config, version: str) -> None:
    """Measure the version now, and keep its results for this run. Raises pytest.UsageError in one line."""
    try:
        settings = anywhere(config)
        if settings.updates:
            raise UsageError("nothing is stored in such a run", hint="leave out --magis-update")
        folder = tempfile.TemporaryDirectory(prefix="magis-against-")
        config.add_cleanup(folder.cleanup)
        measure = _releases if all(map(is_requirement, _requirements(version))) else _revision
        run = measure(config, version, settings, Path(folder.name))
    except UsageError as error:
        text = str(error)
        raise pytest.UsageError(text if text.startswith("--magis-") else f"{FLAG}: {text}") from None
    config.stash[AGAINST] = run.baselines


def _revision(config: pytest.Config, revision: str, _settings: Settings, folder: Path) -> GateRun:
    root = repository(config.rootpath)
    commit = resolved(root, revision)
    _say(config, f"magis: measuring {revision} ({commit[:10]}) to compare with")
    with checkout(root, commit, folder / "checkout") as tree:
        return run_gate(
            revision,
            list(_without_flag(config.invocation_params.args)),
            folder / "run",
            start=config.invocation_params.dir,
            profiles=stored_baselines(config) / "profiles",
            root=root,
            tree=tree,
        )


def _releases(config: pytest.Config, requirements: str, settings: Settings, folder: Path) -> GateRun:
    """The same files in another environment: what the run writes elsewhere stays as this run will write it."""
    python = environment_of(_requirements(requirements), lambda text: _say(config, f"magis: {text}"))
    _say(config, f"magis: measuring with {requirements} to compare with")
    written = [
        f"{BY_NAME[name].flag}={folder / name}"
        for name in FILES
        if getattr(settings, name.replace("-", "_")) is not None
    ]
    if getattr(config.option, "xmlpath", None):
        written.append(f"--junitxml={folder / 'junit.xml'}")
    return run_gate(
        requirements,
        [*_without_flag(config.invocation_params.args), *written],
        folder / "run",
        start=config.invocation_params.dir,
        profiles=stored_baselines(config) / "profiles",
        python=python,
    )


def _requirements(version: str) -> list[str]:
    """One requirement, spaces in it included, or several with spaces between."""
    return [version] if is_requirement(version) else version.split()


def _without_flag(arguments: Sequence[str]) -> Iterator[str]:
    skip = False
    for argument in map(str, arguments):
        if skip or argument == FLAG:
            skip = not skip
        elif not argument.startswith(f"{FLAG}="):
            yield argument


def _say(config: pytest.Config, text: str) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # it is made later than this: pytest's own output has not begun
        sys.stderr.write(f"{text}\n")
    else:
        reporter.write_line(text)


class Guard:
    """In the child: reports modules of the checkout that it is compared with."""

    def pytest_sessionfinish(self) -> None:
        """Leave the files of such modules, a line each, for the parent; nothing if there are none."""
        other = os.environ[COMPARED_WITH]
        found = sorted(strays(dict(sys.modules), Path(other), Path(sys.prefix))) if other else []
        if found:
            with Path(os.environ[STRAYS]).open("a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in found)


def strays(modules: Mapping[str, object], other: Path, prefix: Path) -> Iterator[str]:
    """Files of modules that lie in the checkout `other`, but not in an environment inside of it."""
    for module in modules.values():
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            path = Path(file)
            if path.is_relative_to(other) and not path.is_relative_to(prefix) and "site-packages" not in path.parts:
                yield file
