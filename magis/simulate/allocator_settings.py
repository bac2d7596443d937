"""Settings of CUDA's caching allocator, in the syntax of PYTORCH_ALLOC_CONF.

    expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:8]

Names, values and bounds are those of ``c10/core/AllocatorConfig`` and ``c10/cuda/CUDAAllocatorConfig`` (torch 2.13).
Keys without a part in the bytes reserved on the device are refused, and so is the backend cudaMallocAsync.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from magis.errors import UsageError, nearest
from magis.units import MIB

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with settings; torch takes the first that is set."""
INTERVALS = 16
"""Number of powers of two, from 1 MiB on, with divisions of their own."""
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
"""Requests of at least this size get a segment of their own size."""


@dataclass(frozen=True)
class AllocatorSettings:
    """Parsed settings; the defaults are torch's."""

    expandable_segments: bool = False
    """True: one segment for each pool, which grows and shrinks by pages."""
    max_split_bytes: float = math.inf
    """Free blocks of at least this size are never split, and serve only requests of about their size."""
    max_rounding_bytes: int = LARGE_SEGMENT
    """Bytes by which such a block may exceed a request, exclusive."""
    large_segment_bytes: int = LARGE_SEGMENT
    """Size of a segment for a request above 1 and below 10 MiB; page of an expandable segment of large blocks."""
    divisions: tuple[int, ...] = (0,) * INTERVALS
    """Number of sizes to which requests between two powers of two are rounded up, by interval; 0 or 1: all multiples
    of 512 bytes."""
    collection_threshold: float = 0.0
    """Fraction of the allowed bytes above which cached segments are freed before a new one is made; 0: never."""
    memory_fraction: float = 1.0
    """Fraction of the device's memory that the process may reserve."""

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block that a request of ``nbytes`` asks for."""
        divisions = self.divisions[min(max(0, nbytes.bit_length() - 21), INTERVALS - 1)]
        step = 512
        if divisions > 1 and nbytes > step * divisions:
            step = (1 << nbytes.bit_length() - 1) // divisions
        return max(512, -(-nbytes // step) * step)

    def allowed_bytes(self, device_bytes: int) -> int | None:
        """Return the bytes that the process may reserve; None without a limit."""
        return int(self.memory_fraction * device_bytes) if self.memory_fraction < 1 else None


DEFAULTS = AllocatorSettings()


def allocator_text(given: str | None, device: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the settings of an argument, else of the environment, in short form; empty for torch's defaults.

    The environment has no effect on a CPU. Raises UsageError for settings that are invalid or not simulated.
    """
    if given is None:
        name = next((name for name in VARIABLES if name in environment), None)
        return _in_short(environment[name], name) if name is not None and device != "cpu" else ""
    asked: object = given
    if not isinstance(asked, str):
        raise UsageError(f"allocator: a {type(asked).__name__}", hint="give text: 'expandable_segments:True'")
    found = _in_short(given, "allocator")
    if found and device == "cpu":
        raise UsageError("allocator: a CPU has no caching allocator", hint="name a device such as sim:h100")
    return found


def _in_short(text: str, source: str) -> str:
    return "" if allocator_settings(text, source) == DEFAULTS else "".join(text.split()).strip(",")


@cache
def allocator_settings(text: str, source: str = "allocator") -> AllocatorSettings:
    """Parse settings. Raises UsageError, which names ``source``, where they are invalid or not simulated."""
    found: dict[str, Any] = {}
    for entry in filter(None, _COMMA.split("".join(text.split()))):
        key, _, value = entry.partition(":")
        if key not in KEYS:
            hint = _WITHOUT_PART if key.startswith(_HOST) else nearest(key, KEYS)
            raise UsageError(f"{source}: {key!r} is not simulated", hint=hint)
        try:
            found |= _read(key, value, found.get("large_segment_bytes", LARGE_SEGMENT))
        except ValueError as error:
            raise UsageError(f"{source}: {key}:{value}: {error}") from None
    settings = AllocatorSettings(**found)
    if settings.max_split_bytes < settings.large_segment_bytes:
        raise UsageError(f"{source}: max_split_size_mb must be at least large_segment_size_mb")
    return settings


KEYS = (
    "expandable_segments", "max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold",
    "per_process_memory_fraction", "max_non_split_rounding_mb", "large_segment_size_mb", "backend",
)  # fmt: skip
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma outside of brackets."""
_HOST = ("pinned_", "release_lock_on_", "graph_capture_", "throw_on_")
_WITHOUT_PART = "it has no part in the bytes reserved on the device: name the other settings alone, as allocator="


def _read(key: str, text: str, segment: int) -> dict[str, Any]:
    """Return the field that a key sets, and its value. Raises ValueError for an invalid one."""
    match key:
        case "expandable_segments" if text in ("True", "False"):
            return {key: text == "True"}
        case "expandable_segments":
            raise ValueError("write True or False")
        case "max_split_size_mb":
            return {"max_split_bytes": _megabytes(text, segment)}
        case "max_non_split_rounding_mb":
            return {"max_rounding_bytes": _megabytes(text, segment)}
        case "large_segment_size_mb":
            return {"large_segment_bytes": _megabytes(text, OWN_SEGMENT + MIB)}
        case "roundup_power2_divisions":
            return {"divisions": _list_of_divisions(text) if "[" in text else (_power(text),) * INTERVALS}
        case "garbage_collection_threshold":
            return {"collection_threshold": _share(text, "below", math.nextafter(1, 0))}
        case "per_process_memory_fraction":
            return {"memory_fraction": _share(text, "at most", 1)}
    if text != "native":
        raise ValueError("not simulated; the one that is has the name native")
    return {}


def _list_of_divisions(text: str) -> tuple[int, ...]:
    """Parse a list such as [256:1,512:2,>:8]: an interval begins at so many MiB, the first one holds below, too, and
    ">" beyond the one before."""
    if not text.endswith("]"):
        raise ValueError("the list has no end")
    found, last = [0] * INTERVALS, -1
    for pair in text[1:-1].split(","):
        interval, _, count = pair.partition(":")
        divisions = 0 if count == "0" else _power(count)
        if interval == ">":
            begin = max(last, 0) + 1
            found[begin:] = [divisions] * (INTERVALS - begin)
            continue
        index = min(_power(interval).bit_length(), INTERVALS) - 1
        begin = 0 if last < 0 else index
        found[begin : index + 1] = [divisions] * (index + 1 - begin)
        last = index
    return tuple(found)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _power(text: str) -> int:
    value = _whole(text)
    if value < 1 or value & (value - 1):
        raise ValueError(f"{text} is no power of 2")
    return value


def _megabytes(text: str, least: int) -> int:
    if _whole(text) * MIB < least:
        raise ValueError(f"must be at least {least // MIB}")
    return _whole(text) * MIB


def _share(text: str, bound: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise ValueError(f"must be a number above 0 and {bound} 1")
    return value
