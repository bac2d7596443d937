"""What a bench keeps of its subjects, and what it lets go."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from magis.planner.bench import Bench
from magis.results import Case
from magis.runtime.measure import trim
from magis.units import MIB


def heap_bytes() -> int:
    """Anonymous memory of this process."""
    found = re.search(r"^Anonymous: *(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of the heap of glibc")
def test_freed_memory_goes_back_with_the_last_subject() -> None:
    """What lies between two pieces in use stays in the heap of its own accord."""
    bench = Bench()
    bench.subject(Case("mlp", "eager", "cpu", "small"))
    trim()  # what earlier tests have freed would take up the pieces
    before = heap_bytes()
    pieces = [bytes(2000) for _ in range(40_000)]
    last = pieces[-1]
    grown = heap_bytes() - before
    assert grown > 60 * MIB
    del pieces
    bench.forget()
    assert heap_bytes() - before < grown - 50 * MIB
    assert len(last) == 2000
