"""Revisions of a git repository, checked out in separate folders; the working tree is not changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from magis.child_process import run_captured
from magis.errors import UsageError
from magis.extensions.versions.scratch_folders import PREFIX, remove_abandoned

OF_A_HOOK = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_NAMESPACE",
)
"""Environment variables that git sets for hooks, with which a checkout would modify the index of the current commit."""
FETCH = "name a branch, a tag or a commit that was fetched, or releases as for pip: torch==2.12.0"
SHALLOW = "the clone is shallow: fetch its history with git fetch --unshallow (in CI: fetch-depth: 0)"


def git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command. Raises UsageError with git's last line if it fails."""
    try:
        done = run_captured(["git", "-C", str(folder), *arguments], env=environment())
    except OSError as error:
        raise UsageError(f"git cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise UsageError(lines[-1] if lines else "there is no such revision", hint=FETCH)
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """Return this process's environment variables without those that git sets for hooks."""
    return {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}


def repository(start: Path) -> Path:
    """Return the root of the repository that contains a folder."""
    return Path(git(start, "rev-parse", "--show-toplevel"))


def resolved(root: Path, revision: str) -> str:
    """Return the commit hash of a revision. Raises UsageError if there is no such revision."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except UsageError:
        shallow = git(root, "rev-parse", "--is-shallow-repository") == "true"
        raise UsageError(f"there is no such revision: {revision}", hint=SHALLOW if shallow else FETCH) from None


def commits_between(root: Path, good: str, bad: str) -> list[str]:
    """Return the commits from `good` to `bad`, inclusive, oldest first, along the first parents of `bad`.

    Raises UsageError if `good` is not an ancestor of `bad` along first parents.
    """
    first, last = resolved(root, good), resolved(root, bad)
    listed = git(root, "rev-list", "--first-parent", "--reverse", f"{first}..{last}").split()
    if not listed:
        raise UsageError(f"there is no commit between {good} and {bad}", hint="name the older revision first")
    parents = git(root, "rev-list", "--max-count=1", "--parents", listed[0]).split()[1:]
    if first not in parents:
        shallow = git(root, "rev-parse", "--is-shallow-repository") == "true"
        hint = SHALLOW if shallow else f"name a revision that {bad} was made from: git merge-base {good} {bad}"
        raise UsageError(f"{bad} does not descend from {good} by first parents", hint=hint)
    return [first, *listed]


def title(root: Path, commit: str) -> str:
    """Return a one-line description of a commit: abbreviated hash, date, author and subject."""
    return git(root, "show", "--no-patch", "--date=short", "--format=%h %ad %an: %s", commit)


@contextmanager
def checkout(root: Path, commit: str, folder: Path) -> Iterator[Path]:
    """Check out a commit in `folder` within a `with` block, after removing checkouts left behind by killed runs."""
    forget_abandoned(root)
    try:
        git(root, "worktree", "add", "--quiet", "--detach", str(folder), commit)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _unregister(root, folder)


def forget_abandoned(root: Path) -> None:
    """Remove checkouts left behind by killed processes of magis, with their entries in the repository."""
    listed = git(root, "worktree", "list", "--porcelain").splitlines()
    paths = [Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")]
    ours = [path for path in paths if path.parent.name.startswith(PREFIX)]
    remove_abandoned(path.parent for path in ours)
    for path in ours:
        if not path.parent.exists():
            _unregister(root, path)


def _unregister(root: Path, path: Path) -> None:
    """Remove the worktree entry of a deleted checkout; `git worktree prune` could remove unmounted ones, too."""
    with suppress(UsageError):  # not registered, or another process removed it
        git(root, "worktree", "remove", "--force", "--force", str(path))
