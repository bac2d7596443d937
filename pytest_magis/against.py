"""`--magis-against=REV`: another revision of the project is measured first, and takes the place of stored baselines.

A child process runs the same tests in a checkout of its own (`git worktree`), on the same machine, and stores what it
measures in a folder of this run. What both import must come from their own checkouts: an editable installation would
hand the child the code that it is compared with. So the child looks for its project's code in its own checkout first,
and reports modules that came from the other one all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from magis.errors import UsageError
from pytest_magis.flags import BY_NAME, COMPARED_WITH
from pytest_magis.options import AGAINST, anywhere, stored_baselines

FLAG = BY_NAME["against"].flag
STRAYS = "MAGIS_COMPARED_STRAYS"
"""In the environment of the child: where it reports modules of the checkout that it is compared with."""
OF_A_HOOK = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_NAMESPACE",
)
"""What git sets for its hooks, and then obeys: a checkout would go into the index of the commit that is being made."""
NO_FILE = "ERROR: file or directory not found"


def compare(config: pytest.Config, revision: str) -> None:
    """Measure the revision now, and keep its results for this run. Raises pytest.UsageError in one line."""
    try:
        settings = anywhere(config)
        if settings.updates:
            raise UsageError(f"{FLAG}: nothing is stored in such a run", hint="leave out --magis-update")
        root, commit = _resolved(config.rootpath, revision)
        folder = tempfile.TemporaryDirectory(prefix="magis-against-")
        config.add_cleanup(folder.cleanup)
        baselines = Path(folder.name) / "baselines"
        profiles = stored_baselines(config) / "profiles"
        baselines.mkdir()
        if profiles.is_dir():  # both sides at the same prices
            (baselines / profiles.name).symlink_to(profiles, target_is_directory=True)
        _say(config, f"magis: measuring {revision} ({commit[:10]}) to compare with")
        with _checkout(root, commit, Path(folder.name) / "checkout") as checkout:
            _run(config, revision, root, checkout, baselines)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[AGAINST] = baselines


def _resolved(start: Path, revision: str) -> tuple[Path, str]:
    """The repository's root, and the revision's commit."""
    root = _git(start, "rev-parse", "--show-toplevel")
    return Path(root), _git(start, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise UsageError(f"{FLAG}: git cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else "there is no such revision"
        raise UsageError(f"{FLAG}: {why}", hint="name a branch, a tag or a commit that was fetched")
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}


@contextmanager
def _checkout(root: Path, commit: str, folder: Path) -> Iterator[Path]:
    _git(root, "worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        _git(root, "worktree", "remove", "--force", str(folder))


def _run(config: pytest.Config, revision: str, root: Path, checkout: Path, baselines: Path) -> None:
    """Run this run's command in the checkout; its files that are relative to where it starts stay there."""
    invocation = config.invocation_params
    start = _moved(invocation.dir, root, checkout)
    strays = baselines.parent / "strays"
    command = [
        sys.executable, "-m", "pytest", *_without_flag(invocation.args),
        f"--magis-baselines={baselines}", "--magis-update=new", f"--magis-csv={baselines.parent / 'results.csv'}",
        f"--magis-markdown={baselines.parent / 'summary.md'}",
    ]  # fmt: skip
    # CI keeps an ini file from storing; this folder is nobody's
    environment = {**_environment(), COMPARED_WITH: str(root), STRAYS: str(strays), "PYTHONPATH": _path(root, checkout)}
    environment.pop("GITHUB_ACTIONS", None)
    if not start.is_dir():
        raise UsageError(f"{FLAG}: {revision} has no folder {start.relative_to(checkout)}")
    done = subprocess.run(
        command, cwd=start, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if strays.exists():
        first = strays.read_text(encoding="utf-8").splitlines()[0]
        raise UsageError(
            f"{FLAG}: the run of {revision} imported {first}, which is not of that revision",
            hint="import the project by paths relative to its root (pythonpath in the ini file)",
        )
    said = [line for line in (*done.stdout.splitlines(), *done.stderr.splitlines()) if line.strip()]
    errors = [line for line in said if line.startswith(("ERROR", "E  "))] or said[-1:]
    absent = any(line.startswith(NO_FILE) for line in errors)
    ran = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if done.returncode not in ran and not absent:
        raise UsageError(
            f"{FLAG}: the run of {revision} ended with exit code {done.returncode}: {' '.join(errors[:1])}"
        )


def _without_flag(arguments: Sequence[str]) -> Iterator[str]:
    skip = False
    for argument in map(str, arguments):
        if skip or argument == FLAG:
            skip = not skip
        elif not argument.startswith(f"{FLAG}="):
            yield argument


def _path(root: Path, checkout: Path) -> str:
    """PYTHONPATH of the child: its own checkout in the place of ours, in front of what is installed."""
    prefix = Path(sys.prefix)
    ours = [Path(entry or ".").absolute() for entry in sys.path]
    ours = [entry for entry in ours if entry.is_relative_to(root) and not entry.is_relative_to(prefix)]
    found = [_moved(entry, root, checkout) for entry in (*ours, root, root / "src")]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in given if not Path(entry).absolute().is_relative_to(root)]
    return os.pathsep.join([*dict.fromkeys(str(entry) for entry in found if entry.is_dir()), *others])


def _moved(path: Path, root: Path, checkout: Path) -> Path:
    real = path.resolve()
    return checkout / real.relative_to(root) if real.is_relative_to(root) else path


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
        found = sorted(strays(dict(sys.modules), Path(os.environ[COMPARED_WITH]), Path(sys.prefix)))
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
