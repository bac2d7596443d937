"""Settings of a gate run on another version of the code under test, passed to its process as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from magis.plain_records import from_plain

__all__ = ["COMPARED_WITH", "VersionRun", "current_version_run", "in_working_tree", "rebased_path"]

COMPARED_WITH = "MAGIS_COMPARED_WITH"
"""Environment variable that holds the `VersionRun` as JSON. The plugin's flags repeat the name, since an idle plugin
does not import this library."""


@dataclass(frozen=True)
class VersionRun:
    """Settings of a gate run on another version. The run writes none of the files that its options or ini file name."""

    folder: str
    """Folder for the run's results, which `GateRun` reads."""
    baselines: str
    """Folder in which the run stores baselines; empty: it compares with the project's baselines and stores none."""
    root: str = ""
    """The working tree, whose code the run must not import; empty: the run is in the working tree."""
    tree: str = ""
    """The checkout in which the run takes place."""


def current_version_run() -> VersionRun | None:
    """Return the settings of this process; None if the process is no run on another version."""
    text = os.environ.get(COMPARED_WITH)
    return None if text is None else from_plain(VersionRun, json.loads(text), COMPARED_WITH)


def in_working_tree(path: Path) -> Path:
    """Map a path in this run's checkout to its counterpart in the working tree; return any other path unchanged."""
    run = current_version_run()
    return rebased_path(path, Path(run.tree), Path(run.root)) if run is not None and run.tree else path


def rebased_path(path: Path, root: Path, folder: Path) -> Path:
    """Map a path below `root` to its counterpart below `folder`; return any other path unchanged."""
    real = path.resolve()
    return folder / real.relative_to(root) if real.is_relative_to(root) else path
