"""A cache of texts in a folder: bounded, checksummed, safe for concurrent processes.

A file is ``magis kept 1 <SHA-256 of the rest>``, then the text; its name is a digest. Failures never raise (unless the
folder is required): they cost the time that the cache would have saved, and one warning.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from magis.atomic_files import remove_if_abandoned, write_bytes_atomically
from magis.errors import MagisError, UsageError
from magis.printable import warn
from magis.units import MIB

# Cached results depend on the code as well.

DECIDE = ("numpy", "numba", "rustworkx", "scipy")
"""Packages whose versions affect the results of a search."""


@cache
def code_digest(*further: str) -> str:
    """Return the SHA-256 of this package's sources and of the versions of Python and of packages that affect searches;
    ``further``: more packages (torch, say)."""
    found = hashlib.sha256(platform.python_version().encode())
    for name in (*DECIDE, *further):
        found.update(f"{name} {metadata.version(name)}".encode())
    package = Path(__file__).parent.parent
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}".encode() + path.read_bytes())
    return found.hexdigest()


HEADER = "magis kept 1"
UNSOUND = (MagisError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, MemoryError)
"""Errors that reading a damaged or forged text may raise."""

T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """Limits of a cache folder; beyond them, least recently used texts are removed."""

    total_bytes: int = 256 * MIB
    entry_bytes: int = 32 * MIB
    entries: int = 500


class Kept:
    """A cache of texts by key. The first failure of the folder warns and disables the cache; if ``required``, it raises
    UsageError."""

    def __init__(self, folder: Path, bounds: Bounds | None = None, *, required: bool = False) -> None:
        self.folder = folder
        self._bounds = bounds or Bounds()
        self._required = required
        self._usable = True

    @cached_property
    def code(self) -> str:
        """Return the digest of the code that computes cached texts."""
        return code_digest("torch")

    def key(self, kind: str, *parts: object) -> str:
        """Return the cache key of a kind and parts (by ``repr``), which includes the code digest."""
        found = hashlib.sha256(self.code.encode())
        for part in parts:
            found.update(repr(part).encode() + b"\0")
        return f"{kind}-{found.hexdigest()[:40]}"

    def load(self, key: str, read: Callable[[str], T]) -> T | None:
        """Return the cached text parsed by ``read``; None if missing. A text that is damaged, or for which ``read``
        raises one of ``UNSOUND``, is removed with a warning."""
        path = self._path(key)
        try:
            there = path.lstat()
            if not stat.S_ISREG(there.st_mode):  # reading a pipe would block
                raise MagisError("it is not a regular file")
            if there.st_size > self._bounds.entry_bytes + 100:
                raise MagisError(f"it has {there.st_size:,} bytes")
            head, _, body = path.read_bytes().partition(b"\n")
            if head != f"{HEADER} {hashlib.sha256(body).hexdigest()}".encode():
                raise MagisError("its content is not what was written")
            found = read(body.decode())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(f"cannot read {path}: {error.strerror or error}")
            return None
        except UNSOUND as error:
            self._remove(path, str(error))
            return None
        with suppress(OSError):
            os.utime(path)  # marks it as most recently used
        return found

    def save(self, key: str, text: str) -> None:
        """Cache a text, and remove old ones beyond the limits. A text above the entry limit is not cached."""
        body = text.encode()
        if not self._usable or len(body) > self._bounds.entry_bytes:
            return
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                path.unlink()  # a write would follow it
            write_bytes_atomically(path, f"{HEADER} {hashlib.sha256(body).hexdigest()}\n".encode() + body)
            self._prune()
        except OSError as error:
            self._give_up(f"cannot write {self.folder}: {error.strerror or error}")
        except MagisError as error:
            self._give_up(str(error))

    def drop(self, key: str) -> None:
        """Remove the text of a key."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.txt"

    def _remove(self, path: Path, why: str) -> None:
        with suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        text = f"{path} is not used, and made again: {' '.join(why.split())[:160]}"
        warn(text, RuntimeWarning, stacklevel=3)

    def _give_up(self, why: str) -> None:
        if self._required:
            raise UsageError(why)
        if self._usable:
            self._usable = False
            warn(f"nothing is kept for the next run: {why}", RuntimeWarning, stacklevel=3)

    def _prune(self) -> None:
        """Remove texts beyond the limits, and temporary files of killed writers."""
        entries = sorted(self._entries(), reverse=True)
        taken = 0
        for number, (_used, size, path) in enumerate(entries):
            if path.suffix == ".tmp":
                remove_if_abandoned(path)
                continue
            taken += size
            if number > 0 and (taken > self._bounds.total_bytes or number >= self._bounds.entries):
                path.unlink(missing_ok=True)

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.folder.iterdir():
            if path.suffix in (".txt", ".tmp"):
                with suppress(OSError):  # another process was quicker
                    found = path.lstat()
                    if stat.S_ISREG(found.st_mode):
                        yield found.st_mtime, found.st_size, path
