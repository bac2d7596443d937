"""Peak memory against throughput, as a picture: one mark for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from magis.report.pictures import GRID, across, framed, label

__all__ = ["Mark", "scatter_svg"]

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 40, 56
OURS, THEIRS = "#1f618d", "#b03a2e"
TICKS = 5
APART = 12
"""Pixels between the words of two marks."""


@dataclass(frozen=True)
class Mark:
    """A strategy: samples a second, and MiB at the peak of a rank."""

    name: str
    samples_per_s: float
    peak_mib: float
    published: bool = False
    """Drawn hollow, in another colour: somebody else's figure."""


def scatter_svg(title: str, marks: Sequence[Mark]) -> str:
    """A stand-alone picture; both axes begin at 0. ValueError without marks."""
    if not marks:
        raise ValueError("a picture needs at least one mark")
    fastest = 1.1 * max(mark.samples_per_s for mark in marks)
    largest = 1.1 * max(mark.peak_mib for mark in marks)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    lines = [label((LEFT, 22), title)]
    for tick in range(TICKS + 1):
        share = tick / TICKS
        y, x = HEIGHT - BOTTOM - share * height, LEFT + share * width
        lines += [
            across(LEFT, WIDTH - RIGHT, y),
            label((LEFT - 8, y + 4), f"{share * largest / 1024:.1f}", "end"),
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{GRID}"/>',
            label((x, HEIGHT - BOTTOM + 18), f"{share * fastest:.3g}", "middle"),
        ]
    lines += [
        label(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12), "samples/s", "middle"),
        label((8, TOP - 8), "GiB a rank"),
        label((WIDTH - RIGHT + 12, TOP + 4), "predicted", colour=OURS),
        label((WIDTH - RIGHT + 12, TOP + 20), "published", colour=THEIRS),
    ]
    taken: list[tuple[float, float]] = []
    for mark in sorted(marks, key=lambda each: (each.peak_mib, each.samples_per_s)):
        x = LEFT + mark.samples_per_s / fastest * width
        y = HEIGHT - BOTTOM - mark.peak_mib / largest * height
        colour = THEIRS if mark.published else OURS
        words = f"{mark.name}: {mark.peak_mib:.0f} MiB, {mark.samples_per_s:.4g} samples/s"
        fill = f'fill="white" stroke="{colour}" stroke-width="2"' if mark.published else f'fill="{colour}"'
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {fill}><title>{escape(words)}</title></circle>')
        at = _free(y + 4, x, taken)
        taken.append((x, at))
        lines.append(label((x + 9, at), mark.name, colour=colour))
    return "\n".join(framed((WIDTH, HEIGHT), iter(lines))) + "\n"


def _free(y: float, x: float, taken: Sequence[tuple[float, float]]) -> float:
    """The nearest height upwards at which words do not lie on those of marks drawn before."""
    while any(abs(y - other) < APART and abs(x - where) < RIGHT for where, other in taken):
        y -= 1
    return y
