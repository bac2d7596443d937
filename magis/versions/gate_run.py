"""One run of the gate on another version: the same pytest command in a process of its own, its results in a folder.

What a checkout runs must be its own code: an editable installation would hand it that of the working tree. So Python
looks for the project's code in the checkout first, and modules that came from the working tree all the same are
reported by the plugin of that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magis.errors import UsageError
from magis.versions.revisions import environment, moved

COMPARED_WITH = "MAGIS_COMPARED_WITH"
"""In the environment of a run that another one compares itself with: that one's checkout; empty: it has the same. The
plugin's flags have the name a second time, since an idle plugin loads nothing of this library."""
STRAYS = "MAGIS_COMPARED_STRAYS"
"""In the environment of the child: where it reports modules of the checkout that it is compared with."""
NO_FILE = "ERROR: file or directory not found"
RAN = (0, 1, 5)
"""pytest's exit codes of a run that came to its end: green, red, nothing collected."""


@dataclass(frozen=True)
class GateRun:
    """A version's results."""

    folder: Path

    @property
    def baselines(self) -> Path:
        """What it stored as baselines."""
        return self.folder / "baselines"

    @property
    def csv(self) -> Path:
        """Its results.csv; there is no such file where nothing was gated."""
        return self.folder / "results.csv"


def run_gate(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    start: Path,
    profiles: Path | None = None,
    root: Path | None = None,
    tree: Path | None = None,
    python: Path | None = None,
) -> GateRun:
    """Run `pytest` with `arguments` on a version called `name`, and store what it measures in `folder`.

    `start` is where the command was given; with `tree`, a checkout of the repository at `root`, the run begins at that
    place there. `python` is the interpreter of another environment. `profiles` are operator profiles to price with.
    Raises UsageError in one line where the run does not come to its end, or runs code of another checkout.
    """
    run = GateRun(folder)
    run.baselines.mkdir(parents=True)
    if profiles is not None and profiles.is_dir():  # both sides at the same prices
        (run.baselines / profiles.name).symlink_to(profiles, target_is_directory=True)
    strays = folder / "strays"
    variables = {**environment(), COMPARED_WITH: "", STRAYS: str(strays)}
    if root is not None and tree is not None:
        start = moved(start, root, tree)
        variables |= {COMPARED_WITH: str(root), "PYTHONPATH": _python_path(root, tree)}
        if not start.is_dir():
            raise UsageError(f"{name} has no folder {start.relative_to(tree)}")
    variables.pop("GITHUB_ACTIONS", None)  # CI keeps an ini file from storing; this folder is nobody's
    written = (f"--magis-baselines={run.baselines}", f"--magis-csv={run.csv}", f"--magis-markdown={folder / 'run.md'}")
    done = subprocess.run(
        [str(python or sys.executable), "-m", "pytest", *arguments, *written, "--magis-update=new"],
        cwd=start,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if strays.exists():
        first = strays.read_text(encoding="utf-8").splitlines()[0]
        raise UsageError(
            f"the run of {name} imported {first}, which is not of that revision",
            hint="import the project by paths relative to its root (pythonpath in the ini file)",
        )
    said = [line for line in (*done.stdout.splitlines(), *done.stderr.splitlines()) if line.strip()]
    errors = [line for line in said if line.startswith(("ERROR", "E  "))] or said[-1:]
    if done.returncode not in RAN and not any(line.startswith(NO_FILE) for line in errors):
        raise UsageError(f"the run of {name} ended with exit code {done.returncode}: {' '.join(errors[:1])}")
    return run


def _python_path(root: Path, tree: Path) -> str:
    """PYTHONPATH of the child: its own checkout in the place of ours, in front of what is installed."""
    prefix = Path(sys.prefix)
    ours = [Path(entry or ".").absolute() for entry in sys.path]
    ours = [entry for entry in ours if entry.is_relative_to(root) and not entry.is_relative_to(prefix)]
    found = [moved(entry, root, tree) for entry in (*ours, root, root / "src")]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in given if not Path(entry).absolute().is_relative_to(root)]
    return os.pathsep.join([*dict.fromkeys(str(entry) for entry in found if entry.is_dir()), *others])
