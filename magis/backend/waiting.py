"""How long threads of this process waited for a core: what tells a busy machine from a quiet one.

Linux counts for every thread the nanoseconds in which it could have run and did not. On a quiet machine the thread that
waits most does so for 0.1% of a step's time, beside one other busy process for 40%, at load 8 for 60% and more. From
there on wall times tell little of a step: an operator of two threads ends when the later one got its core, so a step
takes as long as it has parallel operators to wait for; and the threads of two steps in turn are placed each by itself,
those of one on two cores, say, and those of the other on one, for seconds on end: ratios of 0.1 and 10 were seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["longest_wait", "waits"]

_THREADS = Path("/proc/self/task")


def waits(threads: Path = _THREADS) -> dict[str, int]:
    """Nanoseconds that each thread has been ready without a core so far; empty where the system does not count them."""
    found = {}
    if not threads.is_dir():
        return {}
    for thread in threads.iterdir():
        try:
            found[thread.name] = int((thread / "schedstat").read_bytes().split()[1])
        except (OSError, ValueError, IndexError):  # it has ended, or nothing is counted
            continue
    return found


def longest_wait(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Nanoseconds that the thread waited that waited most; 0 where nothing is known."""
    return max((waited - before.get(name, 0) for name, waited in after.items()), default=0)
