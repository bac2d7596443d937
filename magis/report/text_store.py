"""Texts kept in a folder from run to run, bounded, read only if sound; two processes may use one folder.

A kept file is ``magis kept 1 <SHA-256 of the rest>``, then the text. Its name is a digest, never anything that a user
named. Whatever goes wrong costs the time that it would have saved, and one warning: a folder that cannot be written
means that nothing is kept.
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

# What a kept result depends on besides its case: the code that makes it.

DECIDE = ("numpy", "numba", "rustworkx", "scipy")
"""Packages whose versions decide what a search finds."""


@cache
def code_digest(*further: str) -> str:
    """Return the SHA-256 of this package's sources and of the versions of Python and of what searches call.
    ``further`` names more packages (torch, where an operator's figures count)."""
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
    """Limits of a folder: beyond them, what was not used for the longest time goes."""

    total_bytes: int = 256 * MIB
    entry_bytes: int = 32 * MIB
    entries: int = 500


class Kept:
    """Texts in a folder, by key. Warns once of a folder that cannot be used, and then leaves it alone; raises
    UsageError instead where the folder is ``required``."""

    def __init__(self, folder: Path, bounds: Bounds | None = None, *, required: bool = False) -> None:
        self.folder = folder
        self._bounds = bounds or Bounds()
        self._required = required
        self._usable = True

    @cached_property
    def code(self) -> str:
        """Digest of the code that makes what is kept."""
        return code_digest("torch")

    def key(self, kind: str, *parts: object) -> str:
        """Return the name for what depends on these parts (by ``repr``) and on the code."""
        found = hashlib.sha256(self.code.encode())
        for part in parts:
            found.update(repr(part).encode() + b"\0")
        return f"{kind}-{found.hexdigest()[:40]}"

    def load(self, key: str, read: Callable[[str], T]) -> T | None:
        """Return what ``read`` makes of the text; None if there is none. A text that is damaged, or that ``read``
        refuses by one of ``UNSOUND``, is removed with a warning."""
        path = self._path(key)
        try:
            content = self._read_bytes(path)
            if content is None:
                return None
            head, _, body = content.partition(b"\n")
            if head != f"{HEADER} {hashlib.sha256(body).hexdigest()}".encode():
                raise MagisError("its content is not what was written")
            found = read(body.decode())
        except OSError as error:
            self._give_up(f"cannot read {path}: {error.strerror or error}")
            return None
        except UNSOUND as error:
            self._remove(path, str(error))
            return None
        with suppress(OSError):
            os.utime(path)  # used now: it goes last
        return found

    def save(self, key: str, text: str) -> None:
        """Keep a text, and make room for it. One that is larger than an entry may be is not kept."""
        body = text.encode()
        if not self._usable or len(body) > self._bounds.entry_bytes:
            return
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                path.unlink()  # it would be followed
            write_bytes_atomically(path, f"{HEADER} {hashlib.sha256(body).hexdigest()}\n".encode() + body)
            self._prune()
        except OSError as error:
            self._give_up(f"cannot write {self.folder}: {error.strerror or error}")
        except MagisError as error:
            self._give_up(str(error))

    def drop(self, key: str) -> None:
        """Remove a text."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.txt"

    def _read_bytes(self, path: Path) -> bytes | None:
        """Read a file; None if there is no such file, MagisError for one that no writer has left there."""
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
                raise MagisError("it is not a regular file")
            if found.st_size > self._bounds.entry_bytes + 100:
                raise MagisError(f"it has {found.st_size:,} bytes")
            return path.read_bytes()
        except FileNotFoundError:
            return None

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
        """Remove what is over the bounds, and what killed writers left."""
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
