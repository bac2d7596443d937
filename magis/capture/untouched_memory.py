"""Memory that nobody has touched: the operating system hands out pages on first use, so any size costs nothing.

It is mapped beside torch's allocator: what counts a program's bytes (`magis.peak`) does not see captures.
"""

from __future__ import annotations

import mmap
import threading

import torch

CHUNK_BYTES = 1 << 24
"""Smaller memory lies with others in a mapping of this size, which goes when all of them have gone."""
_ALIGNED = 64
"""Bytes; as torch's allocator does it."""
_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap does not name: more than the machine has may be mapped."""


def _mapped(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


class _Chunk:
    """The mapping that small memory is cut from, and how much of it has been."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory, self._used = _mapped(CHUNK_BYTES), 0

    def cut(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Some of it, never the same twice: the mapping, and where in it."""
        with self._lock:
            if self._used + nbytes > CHUNK_BYTES:
                self._memory, self._used = _mapped(CHUNK_BYTES), 0
            start = self._used
            self._used += -(-nbytes // _ALIGNED) * _ALIGNED
            return self._memory, start


_CHUNK = _Chunk()


def untouched(nbytes: int) -> torch.UntypedStorage:
    """A storage of so many bytes on the CPU, with whatever is in it. Its size stays."""
    if not nbytes:
        return torch.UntypedStorage(0)
    memory, start = (_mapped(nbytes), 0) if nbytes > CHUNK_BYTES // 4 else _CHUNK.cut(nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start).untyped_storage()
