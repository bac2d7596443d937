"""Peak memory against throughput, as a picture: one mark for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from magis.report.axes import Label, byte_scale, decimal_scale, placed
from magis.report.pictures import EAGER, GRID, OURS, across, framed, label
from magis.units import MIB

__all__ = ["Mark", "scatter_svg"]

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 72, 150, 40, 56
THEIRS = EAGER
EVERYWHERE = (0, 0, WIDTH, HEIGHT)


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
    rates = decimal_scale(max(mark.samples_per_s for mark in marks))
    peaks = byte_scale(round(max(mark.peak_mib for mark in marks) * MIB))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    lines = []
    for tick in peaks.ticks:
        y = HEIGHT - BOTTOM - peaks.share(tick) * height
        lines += [across(LEFT, WIDTH - RIGHT, y), label((LEFT - 8, y + 4), peaks.words(tick), "end")]
    for tick in rates.ticks:
        x = LEFT + rates.share(tick) * width
        lines += [
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{GRID}"/>',
            label((x, HEIGHT - BOTTOM + 18), rates.number(tick), "middle"),
        ]
    lines += [
        label((8, 22), title),
        label(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12), "samples/s", "middle"),
        label((WIDTH - RIGHT + 12, TOP + 4), "predicted", colour=OURS),
        label((WIDTH - RIGHT + 12, TOP + 20), "published", colour=THEIRS),
    ]
    labels, taken = [], []
    for mark in sorted(marks, key=lambda each: (each.peak_mib, each.samples_per_s)):
        x = LEFT + rates.share(mark.samples_per_s) * width
        y = HEIGHT - BOTTOM - peaks.share(mark.peak_mib * MIB) * height
        colour = THEIRS if mark.published else OURS
        words = f"{mark.name}: {mark.peak_mib:.0f} MiB, {mark.samples_per_s:.4g} samples/s"
        fill = f'fill="white" stroke="{colour}" stroke-width="2"' if mark.published else f'fill="{colour}"'
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {fill}><title>{escape(words)}</title></circle>')
        heights = (y + 4 + sign * by for by in range(HEIGHT) for sign in (-1, 1))  # the nearest free one
        taken.append((x - 6, y - 6, x + 6, y + 6))
        labels.append(Label(mark.name, tuple((x + 9, at, "start") for at in heights), colour))
    lines += [
        label((x, y), each.words, anchor, each.colour) for each, (x, y, anchor) in placed(labels, taken, EVERYWHERE)
    ]
    return "\n".join(framed((WIDTH, HEIGHT), title, lines)) + "\n"
