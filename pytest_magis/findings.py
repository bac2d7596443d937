"""What a verdict consists of: kinds of findings, their parts, tolerances, and figures in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from magis.units import format_bytes

__all__ = [
    "BETTER",
    "BROKEN",
    "NEW",
    "PERMISSIONS",
    "WORSE",
    "Finding",
    "Part",
    "Tolerances",
    "against",
    "joined",
    "percent",
]

NEW, BETTER, WORSE, BROKEN = "new", "better", "worse", "broken"
PERMISSIONS = (NEW, BETTER, WORSE)
"""What --magis-update can accept; nothing accepts a broken case."""


@dataclass(frozen=True)
class Tolerances:
    """Shares by which a figure may exceed its baseline: 0 is exact, 0.05 is five percent."""

    memory: float = 0.0
    latency: float = 0.04
    """Of a latency ratio that was timed."""
    simulated_latency: float = 0.01
    """Of a simulated latency, and of the ratio of two: there is no noise to allow for."""

    def of_latency(self, device: str) -> float:
        """What holds for latencies on a device."""
        return self.simulated_latency if device.startswith("sim:") else self.latency


@dataclass(frozen=True)
class Finding:
    """One difference from what was expected, in one line; kind is NEW, BETTER, WORSE or BROKEN."""

    kind: str
    text: str
    why: str = ""
    """What grew, in one line; empty where nothing is known."""


@dataclass(frozen=True)
class Part:
    """A difference, in full and as an addition to another one of its kind that comes first."""

    kind: str
    text: str
    brief: str


def joined(parts: Iterable[Part]) -> Iterator[Finding]:
    """One finding of each kind: its first part in full, the others in brief."""
    by_kind: dict[str, list[Part]] = {}
    for part in parts:
        by_kind.setdefault(part.kind, []).append(part)
    for kind, (first, *others) in by_kind.items():
        yield Finding(kind, "; ".join([first.text, *(part.brief for part in others)]))


def against(seen: int, allowed: int) -> str:
    """Bytes and what is allowed of them."""
    return f"{seen:,} ({format_bytes(seen)}), allowed {allowed:,} ({format_bytes(allowed)}), {percent(seen, allowed)}"


def percent(seen: float, reference: float) -> str:
    """By how much a figure differs from its reference."""
    if not reference:
        return "was 0"
    share = 100 * float(Fraction(seen) / Fraction(reference) - 1)
    return f"{share:+.1f}%" if abs(share) >= 0.05 else f"{share:+.2g}%"
