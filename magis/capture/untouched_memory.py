"""Memory that nobody has touched: the operating system hands out pages on first use, so any size costs nothing."""

from __future__ import annotations

import mmap

import torch

SEPARATE_BYTES = 1 << 28
"""Larger memory is mapped without the operating system's reservation, which may refuse more than the machine has."""
_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap does not name."""


def untouched(nbytes: int) -> torch.UntypedStorage:
    """A storage of so many bytes on the CPU, with whatever is in it."""
    if nbytes < SEPARATE_BYTES:
        return torch.UntypedStorage(nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8).untyped_storage()
