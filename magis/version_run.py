"""Settings of a run of the gate on another version of the code under test, handed to its process."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from magis.plain_records import from_plain

__all__ = ["COMPARED_WITH", "VersionRun", "current_version_run", "in_working_tree", "rebased_path"]

COMPARED_WITH = "MAGIS_COMPARED_WITH"
"""Environment variable with the `VersionRun` of such a run. The plugin's flags repeat the name, since an idle plugin
loads nothing of this library."""


@dataclass(frozen=True)
class VersionRun:
    """Settings of the run. It writes no file that its options or its ini file name: those belong to another run."""

    folder: str
    """Folder for its results, which `GateRun` reads."""
    baselines: str
    """Folder in which it stores baselines; empty: it compares with the project's baselines and stores nothing."""
    root: str = ""
    """The working tree, whose code the run must not import; empty: it runs there itself."""
    tree: str = ""
    """The checkout that it runs in."""


def current_version_run() -> VersionRun | None:
    """Return the settings of this process; None unless it is such a run."""
    text = os.environ.get(COMPARED_WITH)
    return None if text is None else from_plain(VersionRun, json.loads(text), COMPARED_WITH)


def in_working_tree(path: Path) -> Path:
    """Map a path of the checkout that this process runs in to the working tree; keep any other path."""
    run = current_version_run()
    return rebased_path(path, Path(run.tree), Path(run.root)) if run is not None and run.tree else path


def rebased_path(path: Path, root: Path, folder: Path) -> Path:
    """Map a path below `root` to the same path below `folder`; keep any other path."""
    real = path.resolve()
    return folder / real.relative_to(root) if real.is_relative_to(root) else path
