"""One run of the gate on another version: the same pytest command in a process of its own, its results in a folder.

What a checkout runs must be its own code: an editable installation would hand it that of the working tree. So Python
looks for the project's code in the checkout first, and modules that came from the working tree all the same are
reported by the plugin of that process.
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
"""pytest's exit codes of a run that came to its end: green, red, nothing collected."""


@dataclass(frozen=True)
class GatedCase:
    """The result of one case in a run, compared with its baseline."""

    name: str
    passed: bool
    differs: str
    """Difference from the baseline, or another fault, in words; "" if there is none."""
    needs: tuple[str, ...]
    """Kinds of updates that would store the result; empty if there is nothing to store, or it must not be."""
    stored_with: tuple[str, ...]
    """Identities of the devices of which the baseline has measurements."""
    is_foreign: bool
    """True if these are all of other machines or another torch, so that only tensor bytes were compared. Baselines of
    simulated devices hold everywhere."""
    path: str
    """File of its baseline."""
    outcome: str
    """Text from which the plugin makes a baseline."""

    @property
    def is_new(self) -> bool:
        """True if it has no baseline."""
        return "new" in self.needs

    @property
    def has_moved(self) -> bool:
        """True if its figures differ from those of its baseline, and may replace them."""
        return bool(self.needs) and not self.is_new


@dataclass(frozen=True)
class GateRun:
    """A version's results."""

    folder: Path

    @property
    def baselines(self) -> Path:
        """Folder of the baselines that it stored."""
        return self.folder / "baselines"

    @property
    def csv(self) -> Path:
        """Its results.csv, which is missing if nothing was gated."""
        return self.folder / "results.csv"

    @property
    def strays(self) -> Path:
        """File of the modules that it imported from the working tree, a line each; missing if there are none."""
        return self.folder / "strays"

    @property
    def cases(self) -> Path:
        """File of its `GatedCase`s, a line of JSON each; missing if nothing was gated."""
        return self.folder / "cases"

    def read_cases(self, names: Sequence[str] = ()) -> dict[str, GatedCase]:
        """Return the cases of these names, or all; raises UsageError if one is missing or nothing was gated."""
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
    """Raise UsageError if a run lacks a case of one of these names."""
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
    """Run `pytest` with `arguments` on a version called `name`, and leave what it measures in `folder`.

    `start` is where the command was given; with `tree`, a checkout of the repository at `root`, the run begins at that
    place there. `python` is the interpreter of another environment. The run stores its figures as baselines in the
    folder, or else (`stores`) is compared with those of the project. Latencies have the prices of the working tree's
    operator profiles. Raises UsageError in one line where the run does not come to its end, or runs code of another
    checkout.
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
    """Yield arguments without an option and its value."""
    skip = False
    for argument in arguments:
        if skip or argument == flag:
            skip = not skip
        elif not argument.startswith(f"{flag}="):
            yield argument


def _python_path(root: Path, tree: Path) -> str:
    """Return the child's PYTHONPATH: its own checkout in place of ours, ahead of installed packages."""
    prefix = Path(sys.prefix)
    ours = [Path(entry or ".").absolute() for entry in sys.path]
    ours = [entry for entry in ours if entry.is_relative_to(root) and not entry.is_relative_to(prefix)]
    found = [rebased_path(entry, root, tree) for entry in (*ours, root, root / "src")]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in given if not Path(entry).absolute().is_relative_to(root)]
    return os.pathsep.join([*dict.fromkeys(str(entry) for entry in found if entry.is_dir()), *others])
