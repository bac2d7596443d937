"""A plain reader of memory snapshots: sums of their traces, with all that a viewer rests on checked."""

from __future__ import annotations

import pickle  # noqa: TID251 (as torch's own viewer reads these files)
import pickletools
from pathlib import Path
from typing import Any, NamedTuple

from torch.cuda import _memory_viz

BROWSER = {
    "APPEND", "APPENDS", "BINGET", "BINFLOAT", "BININT", "BININT1", "BININT2", "BINUNICODE", "EMPTY_DICT", "EMPTY_LIST",
    "EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO",
    "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
"""Opcodes of pickle that torch's viewer reads in a browser (torch/utils/viz/MemoryViz.js)."""


class Read(NamedTuple):
    """Peaks of the bytes allocated and reserved, and the snapshot."""

    peak_bytes: int
    reserved_bytes: int
    found: dict[str, Any]

    @property
    def entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.found["device_traces"][0]
        return found

    @property
    def ms(self) -> float:
        """Time of the last entry."""
        return float(self.entries[-1]["time_us"]) / 1e3


def read(path: Path) -> Read:
    """Read a snapshot, and let torch's own parsers read it, too."""
    content = path.read_bytes()
    assert {code.name for code, _, _ in pickletools.genops(content)} <= BROWSER
    found = pickle.loads(content)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(found)
    for text in (_memory_viz.segments, _memory_viz.memory):
        assert text(found, lambda lines: lines).startswith("stream_0;")
    assert "TOTAL MEM" in _memory_viz.trace(found)
    peak, reserved, held, segments = _summed(found["device_traces"][0])
    _check_end(found["segments"], held, segments)
    total = sum(segment["total_size"] for segment in found["segments"])
    assert f"total_reserved: {_memory_viz.Bytes(total)}" in _memory_viz.segsum(found)
    return Read(peak, reserved, found)


def _summed(entries: list[dict[str, Any]]) -> tuple[int, int, dict[int, int], dict[int, int]]:
    """Return peaks of allocated and reserved bytes; bytes by address that are allocated, and pages that are there, at
    the end."""
    held, pages, now, peak, reserved, pending = dict[int, int](), dict[int, int](), 0, 0, 0, 0
    for entry in entries:
        action, address, nbytes = entry["action"], entry["addr"], entry["size"]
        assert entry["frames"] or action.startswith("segment") or action == "snapshot"
        if action == "alloc":
            assert any(start <= address and address + nbytes <= start + n for start, n in _joined(pages))
            assert address not in held
            held[address] = nbytes
            now += nbytes
            peak = max(peak, now)
        elif action == "free_requested":
            pending = address
        elif action == "free_completed":
            assert (held.pop(address), pending) == (nbytes, address)
            now -= nbytes
        elif action in ("segment_alloc", "segment_map"):
            pages[address] = nbytes
            reserved = max(reserved, sum(pages.values()))
        elif action in ("segment_free", "segment_unmap"):
            del pages[address]
        else:
            assert (action, entry["category"]) == ("snapshot", "unknown")  # torch's viewer fails without that category
    times = [entry["time_us"] for entry in entries]
    assert times == sorted(times)
    return peak, reserved, held, pages


def _joined(pages: dict[int, int]) -> list[tuple[int, int]]:
    """Return ranges of addresses with adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for start in sorted(pages):
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + pages[start]
        else:
            found.append((start, pages[start]))
    return found


def _check_end(segments: list[dict[str, Any]], held: dict[int, int], pages: dict[int, int]) -> None:
    """Check that the segments are what the trace leaves, and that their blocks fill them."""
    left = dict[int, int]()
    for segment in segments:
        place = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == place
            place += block["size"]
            if block["state"] == "active_allocated":
                left[block["address"]] = block["requested_size"]
        assert place == segment["address"] + segment["total_size"] < 2**53
        active = sum(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
        assert segment["allocated_size"] == segment["active_size"] == active
    assert left == held
    assert sum(segment["total_size"] for segment in segments) == sum(pages.values())
