"""What a baseline file held before, by the log of its git repository; nothing where there is none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from magis.errors import BaselineError
from pytest_magis.baseline_files import LARGEST_FILE, parse
from pytest_magis.baselines import ModelBaseline

__all__ = ["Commit", "history"]

MOST = 20
"""Commits that are looked at."""
SECONDS = 5.0
"""For one call of git: a slow disk must not hold up a run."""


@dataclass(frozen=True)
class Commit:
    """A commit that changed the file, and what it left there."""

    name: str
    date: str
    subject: str
    baseline: ModelBaseline


def history(path: Path) -> tuple[Commit, ...]:
    """The last commits that changed a baseline file, newest first; those that left no readable one are left out.

    Never raises: without git, repository or commits there is no history.
    """
    return tuple(_commits(path))


def _commits(path: Path) -> Iterator[Commit]:
    log = _git(path.parent, "log", f"--max-count={MOST}", "--format=%h%x1f%cs%x1f%s", "--", path.name)
    for line in (log or "").splitlines():
        name, date, subject = [*line.split("\x1f", 2), "", ""][:3]
        text = _git(path.parent, "show", f"{name}:./{path.name}")
        if text is None or len(text) > LARGEST_FILE:
            continue
        try:
            yield Commit(name, date, subject, parse(text, path))
        except BaselineError:
            continue


def _git(directory: Path, *arguments: str) -> str | None:
    """What git says; None where it cannot."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "--no-pager", "-C", str(directory), *arguments],
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None
