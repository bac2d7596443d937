"""The limits that a plan must meet, the report of the plan, and the largest size within a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from magis.errors import UsageError
from magis.graph import Graph
from magis.printable import printable
from magis.results import Case
from magis.runtime.codegen import CompiledPlan
from magis.units import format_bytes, format_milliseconds, is_number, parse_bytes, share_of

EVEN: Mapping[int, int] = MappingProxyType({})
AUTOCAST = {None: "", torch.bfloat16: "amp-bfloat16", torch.float16: "amp-float16"}


@dataclass(frozen=True)
class Limits:
    """A limit on memory or latency, and the budget of the search."""

    memory_ratio: float | None = None
    memory_bytes: int | None = None
    latency_ratio: float | None = None
    budget: int | None = None
    seconds: float | None = None
    slack: float = Case.slack
    host_limit: int = 0
    """Bytes of optimizer state that may be in host memory between updates."""
    granted: int = 0
    """Bytes that plans for other batches are allowed: a smaller batch that misses its own limit may use as many."""
    compiler: Callable[[Graph], CompiledPlan] | None = None
    """Compiles stretches of the plan; bytes are then those of the compiled plan."""

    @property
    def asked(self) -> dict[str, float]:
        """The limit, by the name of its argument of `magis.optimize`."""
        given = {
            "memory_ratio": self.memory_ratio, "memory_limit": self.memory_bytes, "latency_ratio": self.latency_ratio
        }  # fmt: skip
        return {name: limit for name, limit in given.items() if limit is not None}

    def bytes_of(self, original: int) -> int | None:
        """Return the memory limit in bytes, given the peak bytes of the original step; None if there is none."""
        return self.memory_bytes if self.memory_ratio is None else share_of(self.memory_ratio, original)


@dataclass(frozen=True)
class PlanFigures:
    """Peak bytes of the original and the planned step, and their latency ratio."""

    original_bytes: int
    planned_bytes: int
    limit_bytes: int | None
    latency_ratio: float
    """Predicted latency of the planned step divided by that of the original."""

    @property
    def memory_ratio(self) -> float:
        return self.planned_bytes / max(1, self.original_bytes)


HALF = "{} may leave a step with some weights updated: the limit needs updates before the backward is over"

WHOLE = "a step that raises has updated nothing"


@dataclass(frozen=True)
class PlanReport(PlanFigures):
    """Predicted figures of a planned step. Peaks include persistent tensors (weights, optimizer state, batch)."""

    recomputed_ops: int
    swapped_bytes: int
    fission: str
    """Names of the operators that run in parts (fission); empty if none does."""
    update: str
    """Place of the weight update, in words."""
    torn_by: str
    """Names of errors that may leave some weights updated and others not; empty if no error can."""
    seconds: float
    """Seconds that the search took."""
    host_bytes: int = 0
    """Bytes of optimizer state in host memory between updates."""
    compiled: str = ""
    """Operators that inductor compiled, in words; empty if none were to be compiled."""

    def __str__(self) -> str:
        peaks = f"{format_bytes(self.planned_bytes)}, eager {format_bytes(self.original_bytes)}"
        lines = [
            f"peak memory  {peaks} (ratio {self.memory_ratio:.3f})",
            f"latency      {self.latency_ratio:.3f} times eager's, predicted",
            f"recomputed   {self.recomputed_ops} operators",
            f"swapped      {format_bytes(self.swapped_bytes)}",
            *([f"on the host  {format_bytes(self.host_bytes)} of optimizer state"] if self.host_bytes else []),
            f"in parts     {self.fission or 'nothing'}",
            f"update       {self.update}",
            f"errors       {HALF.format(self.torn_by) if self.torn_by else WHOLE}",
            f"search       {format_milliseconds(1000 * self.seconds)}",
            *([f"compiled     {self.compiled}"] if self.compiled else []),
        ]
        return "\n".join(map(printable, lines))


RANGES = {
    "memory_ratio": (0.0, 1.0, "use a share above 0 and at most 1"),
    "latency_ratio": (1.0, math.inf, "use a multiple of at least 1"),
    "budget": (1, math.inf, "use a whole number of plans above 0"),
    "seconds": (0.0, math.inf, "use a number above 0"),
    "memory_limit": (0.0, math.inf, 'use an amount above 0, such as "8 GiB"'),
    "slack": (0.0, Case.MOST_SLACK, f"use a share from 0 to {Case.MOST_SLACK}"),
    "host_limit": (0.0, math.inf, 'use an amount, such as "64 GiB", or 0'),
}
"""Allowed values by argument: least, most, and the hint of the error."""


def limits_of(asked: Mapping[str, Any], hints: Mapping[str, str] = MappingProxyType({})) -> Limits:
    """Return the limits among a caller's arguments. Raises UsageError for invalid ones; `hints` replace the usual
    hints."""
    found = {name: asked.get(name) for name in RANGES}
    for name in ("memory_limit", "host_limit"):
        given = found[name]
        found[name] = parse_bytes(given) if isinstance(given, str) else given
    for name, (least, most, hint) in RANGES.items():
        number = found[name]
        if number is None:
            continue
        fits = is_number(number) and least <= number <= most and (number > 0 or name in ("slack", "host_limit"))
        if not fits or (name in ("budget", "memory_limit", "host_limit") and not float(number).is_integer()):
            raise UsageError(f"{name}={asked[name]!r}", hint=hints.get(name, hint))
    whole = found["memory_limit"], found["budget"]
    nbytes, budget = (None if number is None else int(number) for number in whole)
    slack = Case.slack if found["slack"] is None else found["slack"]
    moved = int(found["host_limit"] or 0)
    return Limits(found["memory_ratio"], nbytes, found["latency_ratio"], budget, found["seconds"], slack, moved)


def largest(
    fits: Callable[[int], bool], start: int, most: int, *, precision: float = 0.0, spare: Mapping[int, int] = EVEN
) -> int | None:
    """Return the largest size from 1 to ``most`` that fits, if all smaller ones fit, too; None if 1 does not. The
    search doubles or halves from ``start``, then narrows until it is within ``precision`` (a share of the size): by
    halves, or, three times of four, to where the bytes that sizes tried left of a limit, their ``spare``, reach 0."""
    low, high = 0, most + 1  # low fits, high does not
    size = min(start, most)
    turn = 0
    while low + 1 < high:
        if fits(size):
            low = size
        else:
            high = size
        if low and high <= most:
            if high - low <= max(1.0, precision * low):
                break
            size = (low + high) // 2
            turn += 1
            if turn % 4 and low in spare and high in spare:  # every fourth time by halves: bytes may be no line
                size = low + (high - low) * spare[low] // (spare[low] - spare[high])
                size = min(max(size, low + 1), high - 1)
        else:
            size = min(2 * size, most) if low else size // 2
        if size in (0, low, high):
            break
    return low or None
