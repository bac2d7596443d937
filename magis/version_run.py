"""A run of the gate on another version of the code under test: what that process is told."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from magis.plain_records import from_plain

__all__ = ["COMPARED_WITH", "VersionRun", "in_working_tree", "moved", "told"]

COMPARED_WITH = "MAGIS_COMPARED_WITH"
"""In the environment of such a run: its `VersionRun`. The plugin's flags have the name a second time, since an idle
plugin loads nothing of this library."""


@dataclass(frozen=True)
class VersionRun:
    """What the run is told. Files that its options and its ini file name are for another run to write: it writes none
    of them."""

    folder: str
    """Where it leaves its results, for `GateRun`."""
    baselines: str
    """Where it stores its figures as baselines; empty: it is compared with those of the project, and stores nothing."""
    root: str = ""
    """The working tree, whose code it must not import; empty: it runs there itself."""
    tree: str = ""
    """The checkout that it runs in."""


def told() -> VersionRun | None:
    """What this process was told, if it is such a run."""
    text = os.environ.get(COMPARED_WITH)
    return None if text is None else from_plain(VersionRun, json.loads(text), COMPARED_WITH)


def in_working_tree(path: Path) -> Path:
    """A path of the checkout that this process runs in, as one of the working tree; any other path as it is."""
    run = told()
    return moved(path, Path(run.tree), Path(run.root)) if run is not None and run.tree else path


def moved(path: Path, root: Path, folder: Path) -> Path:
    """Where a path of the repository lies in a checkout of it; any other path as it is."""
    real = path.resolve()
    return folder / real.relative_to(root) if real.is_relative_to(root) else path
