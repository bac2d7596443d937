"""Settings of the process for steady steps: OpenMP and malloc, applied before torch is imported
(docs/notes/timing.md), Python's garbage collector, and native code that prints."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["before_torch", "collector_off", "stdout_dropped"]

_M_ARENA_MAX = -8
"""The constant ``M_ARENA_MAX`` of glibc's ``mallopt``."""


def before_torch() -> None:
    """Make OpenMP threads sleep while they wait (no spinning), and limit malloc to one arena.

    ``OMP_WAIT_POLICY`` and ``MALLOC_ARENA_MAX`` of the user's environment take precedence.

    Spinning threads make steps on a busy machine several times slower. A thread's own malloc arena holds at most 64 MiB
    and returns larger tensors to the system at once: every operator would fault the pages in again, which takes longer
    and varies more than the operator.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        import ctypes  # here, since an idle plugin should not pay for it

        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn Python's garbage collector off in the block: tensors in reference cycles would die at any operator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def stdout_dropped() -> Iterator[None]:
    """Drop what native code prints on stdout in the block: HiGHS, in scipy 1.17, prints a debugging line."""
    import ctypes

    flush = ctypes.CDLL(None).fflush
    kept = None
    with suppress(OSError):  # closed
        kept = os.dup(1)
    flush(None)
    try:
        if kept is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)
        yield
    finally:
        flush(None)
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
