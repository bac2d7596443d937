"""A memory snapshot of torch's CUDA allocator, which `torch.cuda._memory_viz` and other viewers open.

A snapshot holds plain dictionaries and lists. It is pickled here, and never read. Addresses and segments are those of
the simulated allocator. An allocation has the bytes that the simulator counts for it; what its block has beyond them is
a free block behind it, so that every reader finds the simulator's peak.
"""

from __future__ import annotations

import pickle  # noqa: TID251 (written, never read)
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from magis.atomic_files import check_writable, write_bytes_atomically
from magis.errors import UsageError
from magis.simulate.allocator_settings import allocator_settings
from magis.simulate.cuda_caching_allocator import CachingAllocator
from magis.simulate.reserved_bytes import RELEASE

PROTOCOL = 4
"""Latest protocol of pickle that torch's viewer in a browser reads."""
BASE = 0x7F << 40
"""Address of the first segment. A browser needs addresses below 2**53."""
WORKSPACE = "workspace"
"""Kind of what an operator allocates besides its outputs."""

Frames = list[dict[str, Any]]


class Change(NamedTuple):
    """An allocation or a free, with the time in ns."""

    name: int
    nbytes: int
    """Bytes asked of the allocator; RELEASE: free."""
    ns: int
    counted: int = 0
    """Bytes that the allocation counts with."""
    kind: str = ""
    frames: Frames = []  # noqa: RUF012 (it is never changed)


class CallStacks:
    """Maker of lists of frames, innermost first: an operator or a tensor at its line, the modules around it, the phase.
    Equal frames are one object, and so are equal lists: pickle writes each once."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._lists: dict[tuple[str, ...], Frames] = {}

    def of(self, name: str, module: str, phase: str = "", line: str = "") -> Frames:
        """Return the frames of an operator or a tensor; ``line`` is file and line ("net.py:31")."""
        key = name, module, phase, line
        if key not in self._lists:
            file, _, number = line.rpartition(":")
            parts = module.split(".") if module else []
            around = [(".".join(parts[:depth]), "module", 0) for depth in range(len(parts), 0, -1)]
            frames = [(name, file, int(number) if number.isdigit() else 0), *around, (phase, "phase", 0)]
            self._lists[key] = [self._frame(*each) for each in frames if each[0]]
        return self._lists[key]

    def _frame(self, name: str, file: str, line: int) -> dict[str, Any]:
        return self._frames.setdefault((name, file, line), {"filename": file, "line": line, "name": name})


def snapshot(
    before: Iterable[Change], step: Iterable[Change], allocator: CachingAllocator, settings: str = ""
) -> bytes:
    """Return the pickled snapshot of a step on an allocator; what is allocated ``before`` stands at its beginning."""
    trace = _Trace(allocator, "segment_map" if allocator_settings(settings).expandable_segments else "segment_alloc")
    for each in before:
        trace.take(each, 0)
    trace.begin()
    start = None
    for each in step:
        start = each.ns if start is None else start
        trace.take(each, (each.ns - start) // 1000)
    trace.note("snapshot", BASE, 0, Change(0, 0, 0, kind="unknown"))  # torch's viewer needs an entry of that category
    found = {
        "segments": trace.segments(),
        "device_traces": [trace.entries],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings},
        "external_annotations": [],
    }
    return pickle.dumps(found, PROTOCOL)


def save(path: str | Path, make: Callable[[], bytes]) -> None:
    """Write the snapshot that ``make`` returns to a file. Raises UsageError, before that, if it cannot be written."""
    try:
        check_writable(Path(path))
    except (TypeError, ValueError) as error:  # no path, or NUL in its name
        raise UsageError(f"cannot write {path!r}: {error}") from None
    write_bytes_atomically(Path(path), make())


@dataclass
class _Trace:
    """Entries of a trace, and what is allocated."""

    allocator: CachingAllocator
    makes: str
    """Action that makes a segment, or a piece of one."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    _us: int = 0
    _alive: dict[int, Change] = field(default_factory=dict)

    def take(self, change: Change, us: int) -> None:
        """Run an allocation or a free on the allocator, and write it."""
        self._us = us
        if change.nbytes == RELEASE and change.name in self._alive:
            gone, address = self._alive.pop(change.name), BASE + self.allocator.address(change.name)
            self.allocator.release(change.name)
            for action in ("free_requested", "free_completed"):
                self.note(action, address, gone.counted, gone._replace(kind=""))
        elif change.nbytes > 0:
            self.allocator.allocate(change.name, change.nbytes)
            for action, address, nbytes in self.allocator.changes:
                self.note(action, BASE + address, nbytes, change._replace(kind=""))
            self.allocator.changes.clear()
            self._alive[change.name] = change
            self.note("alloc", BASE + self.allocator.address(change.name), change.counted, change)

    def begin(self) -> None:
        """Replace all entries by those that make the segments and allocations of now."""
        self.entries.clear()
        for segment in self.segments():
            self.note(self.makes, segment["address"], segment["total_size"], Change(0, 0, 0))
        for name, each in self._alive.items():
            self.note("alloc", BASE + self.allocator.address(name), each.counted, each)

    def note(self, action: str, address: int, nbytes: int, origin: Change) -> None:
        """Write an entry."""
        entry = {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": self._us}
        entry["frames"] = origin.frames
        self.entries.append(entry | {"category": origin.kind} if origin.kind else entry)

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments of now, with their blocks."""
        found: list[dict[str, Any]] = []
        for at, nbytes, name, small, first in self.allocator.blocks():
            if first:
                about: dict[str, Any] = {"device": 0, "stream": 0, "segment_type": "small" if small else "large"}
                about |= {"segment_pool_id": (0, 0), "is_expandable": self.makes == "segment_map"}
                about |= {"frames": [], "blocks": []}
                sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), 0)
                found.append({"address": BASE + at, **sizes, **about})
            used = Change(0, 0, 0) if name is None else self._alive[name]
            active = ("active_allocated", at, used.counted, used.frames)
            for state, address, size, frames in (active, ("inactive", at + used.counted, nbytes - used.counted, [])):
                block = {"address": BASE + address, "size": size, "requested_size": size, "state": state}
                found[-1]["blocks"] += [block | {"frames": frames}] if size else []
            found[-1]["total_size"] += nbytes
            for key in ("allocated_size", "active_size", "requested_size"):
                found[-1][key] += used.counted
        return found
