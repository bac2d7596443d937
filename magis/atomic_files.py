"""Atomic file writes: a temporary file beside the target, flushed to disk, then renamed over it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from magis.errors import UsageError

LARGEST_FILE = 256 * 1024 * 1024


def write_text_atomically(path: Path, text: str) -> None:
    """Replace the file `path` by text in UTF-8, atomically. Raises UsageError if that is impossible."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Replace the file `path` by `content` atomically: a reader sees the old file or the new one, never a part.

    Symbolic links are followed: the file behind the link is replaced. On any error or interrupt the old file is
    unchanged and the temporary file is removed. Raises UsageError for a path that cannot be written.
    """
    target = path.resolve()
    try:
        _refuse_special(path, target)
        put_in_place(target, content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def put_in_place(target: Path, content: bytes) -> None:
    """Replace the file `target`, which is no symbolic link, by `content` atomically. Raises OSError.

    The writer holds a lock on the temporary file until it exits.
    """
    _remove_abandoned_of(target)
    temporary = _beside(target)
    try:
        # "x" rather than mkstemp: the new file gets the permissions that any new file gets
        with temporary.open("xb") as stream:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(stream, fcntl.LOCK_EX)
            if not os.fstat(stream.fileno()).st_nlink:  # taken for an abandoned one before it was locked
                put_in_place(target, content)
                return
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o777)
            temporary.replace(target)
    finally:
        with suppress(OSError):  # in place by now, or never made
            temporary.unlink()


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")


def _remove_abandoned_of(target: Path) -> None:
    ours = re.compile(rf"\.{re.escape(target.name[:100])}\.[0-9a-f]{{8}}\.tmp")
    with suppress(OSError):
        for path in target.parent.iterdir():
            if ours.fullmatch(path.name):
                remove_if_abandoned(path)


def remove_if_abandoned(temporary: Path) -> None:
    """Remove a temporary file whose writer was killed: its lock is free."""
    with suppress(OSError):
        handle = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
        finally:
            os.close(handle)


def read_regular(path: Path, largest: int = LARGEST_FILE) -> str:
    """Read a regular file in UTF-8. Raises OSError for other files or more than `largest` bytes, UnicodeDecodeError."""
    check_readable(path, largest)
    return path.read_bytes().decode()


def check_readable(path: Path, largest: int = LARGEST_FILE) -> None:
    """Raise OSError unless `path` is a regular file (reading a pipe would never end) of at most `largest` bytes."""
    try:
        found = path.stat()
    except ValueError as error:  # NUL in its name
        raise OSError(errno.EINVAL, str(error)) from None
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if found.st_size > largest:
        raise OSError(errno.EFBIG, f"it has more than {largest} bytes")


def check_writable(path: Path) -> None:
    """Raise UsageError unless `write_text_atomically` can replace `path` now.

    Creates and removes an empty file in the folder, since permission bits do not tell (for root, or on a read-only file
    system). Also removes temporary files of killed writers.
    """
    target = path.resolve()
    probe = _beside(target)
    try:
        _refuse_special(path, target)
        if not target.parent.is_dir():
            kind = "not a directory" if target.parent.exists() else "no such directory"
            raise UsageError(f"cannot write {path}: {kind}: {target.parent}")
        _remove_abandoned_of(target)
        probe.touch(exist_ok=False)
        probe.unlink(missing_ok=True)  # another run may take it for an abandoned one
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _refuse_special(path: Path, target: Path) -> None:
    """Raise UsageError for a directory, a device or a pipe, which a rename would destroy."""
    if target.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory")
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write {path}: it is not a regular file")
