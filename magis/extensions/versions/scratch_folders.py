"""Temporary folders of runs that compare versions; folders left by a killed run are removed by the next run."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "magis-versions-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a temporary folder within a `with` block, locked while this process lives."""
    remove_abandoned(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        handle = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.is_dir():
            break
        os.close(handle)  # taken for an abandoned one before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove the folders of killed processes of magis, recognized by their released lock."""
    for folder in folders:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.name.startswith(PREFIX) and os.fstat(handle).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
