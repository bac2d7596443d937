"""Run of the gate on another version: the same pytest command in a child process, with its results in a folder.

A checkout must run its own code, but an editable installation would import the working tree. So Python searches the
checkout first, and the plugin in the child process reports modules that still came from the working tree.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from magis.child_process import run_bound
from magis.errors import UsageError
from magis.extensions.versions.revisions import environment
from magis.plain_records import from_plain, to_plain
from magis.version_run import COMPARED_WITH, VersionRun, rebased_path

NO_FILE = "ERROR: file or directory not found"
RAN = (0, 1, 5)
"""pytest's exit codes of a complete run: green, red, nothing collected."""


@dataclass(frozen=True)
class GatedCase:
    """Result of one case in a run, compared with its baseline."""

    name: str
    passed: bool
    differs: str
    """Difference from the baseline, or another failure, in words; "" if there is none."""
    needs: tuple[str, ...]
    """Kinds of updates that would store the result; empty if there is nothing to store, or nothing can accept it."""
    stored_with: tuple[str, ...]
    """Identities of the devices that the baseline has measurements of."""
    is_foreign: bool
    """True if the baseline only has measurements of other devices or another torch, so that only tensor bytes were
    compared. Always False on simulated devices."""
    path: str
    """Path of the case's baseline file."""
    outcome: str
    """Serialized outcome, from which the plugin makes a baseline."""

    @property
    def is_new(self) -> bool:
        """True if the case has no baseline."""
        return "new" in self.needs

    @property
    def has_moved(self) -> bool:
        """True if the figures differ from the baseline's, and an update would replace the baseline."""
        return bool(self.needs) and not self.is_new


@dataclass(frozen=True)
class GateRun:
    """Results of a version, as files in a folder."""

    folder: Path

    @property
    def baselines(self) -> Path:
        """Folder of the baselines that the run stored."""
        return self.folder / "baselines"

    @property
    def csv(self) -> Path:
        """Path of the run's results.csv, which is missing if nothing was gated."""
        return self.folder / "results.csv"

    @property
    def strays(self) -> Path:
        """File that lists modules imported from the working tree by mistake, one per line; missing without any."""
        return self.folder / "strays"

    @property
    def cases(self) -> Path:
        """File of the run's `GatedCase`s, one line of JSON each; missing if nothing was gated."""
        return self.folder / "cases"

    def read_cases(self, names: Sequence[str] = ()) -> dict[str, GatedCase]:
        """Return the cases of these names; default: all. Raises UsageError for a missing case, or if none was gated."""
        self.check_gated()
        lines = self.cases.read_text(encoding="utf-8").splitlines()
        cases = [from_plain(GatedCase, json.loads(line), "case") for line in lines]
        found = {case.name: case for case in cases}
        check_cases(names, found)
        return {name: found[name] for name in names} if names else found

    def check_gated(self) -> None:
        """Raise UsageError if nothing was gated."""
        if not self.csv.is_file():
            hint = "give pytest's arguments behind --, such as -- test_memory.py"
            raise UsageError("nothing was gated there", hint=hint)


def check_cases(names: Sequence[str], found: Collection[str]) -> None:
    """Raise UsageError if a name is not among the cases found."""
    missing = [name for name in names if name not in found]
    if missing:
        raise UsageError(f"there is no case {missing[0]}", hint=f"the run has {', '.join(sorted(found)[:8]) or 'none'}")


def run_gate(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    start: Path,
    root: Path | None = None,
    tree: Path | None = None,
    python: Path | None = None,
    stores: bool = True,
) -> GateRun:
    """Run `pytest` with `arguments` on a version called `name`, and write its results to `folder`.

    `start` is the folder in which the command was given; with `tree`, a checkout of the repository at `root`, the run
    starts in the same place of the checkout. `python` is the interpreter of another environment. With `stores`, the run
    stores its figures as baselines in the folder, else it is compared with the project's baselines. Operator profiles
    are those of the working tree. Raises UsageError in one line if the run does not complete, or imports code of
    another checkout.
    """
    run = GateRun(folder)
    run.baselines.mkdir(parents=True)
    variables = environment()
    others = {}
    if root is not None and tree is not None:
        start = rebased_path(start, root, tree)
        if not start.is_dir():
            raise UsageError(f"{name} has no folder {start.relative_to(tree)}")
        others = {"root": str(root), "tree": str(tree.resolve())}
        variables["PYTHONPATH"] = _python_path(root, tree)
    version_run = VersionRun(str(folder), str(run.baselines) if stores else "", **others)
    variables[COMPARED_WITH] = json.dumps(to_plain(version_run))
    variables.pop("GITHUB_ACTIONS", None)  # its red cases are no annotations of ours
    written = (f"--magis-csv={run.csv}", f"--magis-markdown={folder / 'run.md'}")
    update = ("--magis-update=new",) if stores else ()
    asked = without_flag(arguments, "--benchmark-json")  # another run's file, which pytest-benchmark empties at once
    command = [str(python or sys.executable), "-m", "pytest", *asked, *written, *update]
    done = run_bound(command, cwd=start, env=variables)
    if run.strays.exists():
        first = run.strays.read_text(encoding="utf-8").splitlines()[0]
        raise UsageError(
            f"the run of {name} imported {first}, which is not of that revision",
            hint="import the project by paths relative to its root (pythonpath in the ini file)",
        )
    said = [line for line in (*done.stdout.splitlines(), *done.stderr.splitlines()) if line.strip()]
    errors = [line for line in said if line.startswith(("ERROR", "E  "))] or said[-1:]
    if done.returncode not in RAN and not any(line.startswith(NO_FILE) for line in errors):
        raise UsageError(f"the run of {name} ended with exit code {done.returncode}: {' '.join(errors[:1])}")
    return run


def without_flag(arguments: Iterable[str], flag: str) -> Iterator[str]:
    """Yield the arguments without an option and its value."""
    skip = False
    for argument in arguments:
        if skip or argument == flag:
            skip = not skip
        elif not argument.startswith(f"{flag}="):
            yield argument


def _python_path(root: Path, tree: Path) -> str:
    """Return PYTHONPATH for the child process: the checkout's folders in place of the working tree's, before others."""
    prefix = Path(sys.prefix)
    ours = [Path(entry or ".").absolute() for entry in sys.path]
    ours = [entry for entry in ours if entry.is_relative_to(root) and not entry.is_relative_to(prefix)]
    found = [rebased_path(entry, root, tree) for entry in (*ours, root, root / "src")]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in given if not Path(entry).absolute().is_relative_to(root)]
    return os.pathsep.join([*dict.fromkeys(str(entry) for entry in found if entry.is_dir()), *others])
