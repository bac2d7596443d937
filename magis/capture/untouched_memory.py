"""Untouched memory: the operating system maps pages on first use, so that a storage of any size takes no memory. It is
mapped outside of torch's allocator, so that `magis.peak` does not count captures."""

from __future__ import annotations

import mmap
import threading

import torch

CHUNK_BYTES = 1 << 24
"""Bytes of a mapping that small storages share; it is unmapped when all of them are dead."""
_ALIGNED = 64
"""Alignment in bytes, as in torch's allocator."""
_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python's mmap does not name: more memory than the machine has may be mapped."""


def _mapped(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


class _Chunk:
    """The mapping from which small storages are allocated, and its used bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory, self._used = _mapped(CHUNK_BYTES), 0

    def cut(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Allocate bytes that were never handed out before; return the mapping and the offset."""
        with self._lock:
            if self._used + nbytes > CHUNK_BYTES:
                self._memory, self._used = _mapped(CHUNK_BYTES), 0
            start = self._used
            self._used += -(-nbytes // _ALIGNED) * _ALIGNED
            return self._memory, start


_CHUNK = _Chunk()


def untouched(nbytes: int) -> torch.UntypedStorage:
    """Return an uninitialized CPU storage of this many bytes, which cannot be resized."""
    if not nbytes:
        return torch.UntypedStorage(0)
    memory, start = (_mapped(nbytes), 0) if nbytes > CHUNK_BYTES // 4 else _CHUNK.cut(nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start).untyped_storage()
