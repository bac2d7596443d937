"""Parts of the HTML report: escaped text and elements, and earlier versions of a baseline file from git."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from magis.errors import BaselineError
from magis.printable import printable
from pytest_magis.baseline_files import LARGEST_FILE, parse
from pytest_magis.baselines import ModelBaseline


def text(words: object) -> str:
    """Return text escaped for HTML, quotes included."""
    return printable(words, "html")


def embedded(data: object) -> str:
    """Return JSON for a <script> element, with escapes for characters that could end the element or begin a comment."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        plain = plain.replace(mark, f"\\u{ord(mark):04x}")
    return plain


MOST = 20
"""Maximum number of commits to read."""
SECONDS = 5.0
"""Timeout of one git command in seconds, so that a slow disk does not delay a run."""


@dataclass(frozen=True)
class Commit:
    """A commit that changed a baseline file, with the content after it."""

    name: str
    date: str
    subject: str
    baseline: ModelBaseline


def history(path: Path) -> tuple[Commit, ...]:
    """Return the last commits that changed a baseline file, newest first, skipping unreadable versions.

    Returns () on any failure: without git, without a repository or without commits.
    """
    found = []
    log = git(path.parent, "log", f"--max-count={MOST}", "--format=%h%x1f%cs%x1f%s", "--", path.name)
    for line in (log or "").splitlines():
        name, date, subject = [*line.split("\x1f", 2), "", ""][:3]
        text = git(path.parent, "show", f"{name}:./{path.name}")
        if text is not None and len(text) <= LARGEST_FILE:
            with suppress(BaselineError):
                found.append(Commit(name, date, subject, parse(text, path)))
    return tuple(found)


def git(directory: Path, *arguments: str) -> str | None:
    """Run git and return its standard output; None if it fails."""
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
