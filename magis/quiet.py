"""Settings of threads and allocator, made before torch is loaded, for steady times of steps (docs/notes/timing.md)."""

from __future__ import annotations

import os
import sys

__all__ = ["before_torch"]

_M_ARENA_MAX = -8
"""Number of the option in glibc's ``mallopt``."""


def before_torch() -> None:
    """Make OpenMP's threads sleep while they wait, and all threads share one heap.

    ``OMP_WAIT_POLICY`` and ``MALLOC_ARENA_MAX`` win where the user has set them.

    Threads that spin while they wait make steps on a busy machine several times slower. A heap of glibc for a thread
    beside the main one holds at most 64 MiB and returns larger tensors to the system at once: every operator would
    fault its pages in again, at a cost that varies more than the operator itself.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        import ctypes  # here, since an idle plugin should not pay for it

        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)
