"""What a process sets before torch is loaded, so that times of steps mean something (docs/notes/timing.md)."""

from __future__ import annotations

import os
import sys

__all__ = ["before_torch"]

_M_ARENA_MAX = -8
"""Of glibc's ``mallopt``."""


def before_torch() -> None:
    """Make OpenMP's threads sleep while they wait, and all threads share one heap.

    Unless the user says otherwise: ``OMP_WAIT_POLICY``, ``MALLOC_ARENA_MAX``.

    Threads that spin while they wait make steps on a busy machine several times slower. Heaps of other threads than the
    main one hold 64 MiB at most and return larger tensors to the system at once: every operator would fault its pages
    in anew, at a cost that varies more than the operator itself. (Where the C library is not glibc: nothing to do.)
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        import ctypes  # here, since an idle plugin should not pay for it

        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)
