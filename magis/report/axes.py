"""Axes with round ticks, and labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from magis.units import format_bytes, parse_bytes

MOST_INTERVALS = 7
"""Maximum number of intervals between ticks; an axis has 3 to 8 ticks."""


@dataclass(frozen=True)
class LinearScale:
    """A linear axis with round ticks, from 0 to at least the largest value."""

    step: float
    intervals: int
    unit: str
    per_unit: float = 1.0

    @property
    def end(self) -> float:
        return self.step * self.intervals

    @property
    def ticks(self) -> tuple[float, ...]:
        return tuple(self.step * number for number in range(self.intervals + 1))

    def share(self, value: float) -> float:
        """Return the relative position of a value: 0 at the start of the axis, 1 at its end."""
        return value / self.end

    def number(self, tick: float) -> str:
        """Return the label of a tick, without its unit."""
        return f"{tick / self.per_unit:g}"

    def words(self, tick: float) -> str:
        return f"{self.number(tick)} {self.unit}" if tick else "0"


def byte_scale(most: int) -> LinearScale:
    """Return an axis for bytes: ticks a power of two apart, in one binary unit."""
    step = 1
    while -(-most // step) > MOST_INTERVALS:
        step *= 2
    intervals = max(2, -(-most // step))
    unit = format_bytes(step * intervals).partition(" ")[2]
    return LinearScale(step, intervals, unit, parse_bytes(f"1 {unit}"))


def decimal_scale(most: float, unit: str = "", per_unit: float = 1.0) -> LinearScale:
    """Return an axis with ticks 1, 2 or 5 times a power of ten apart."""
    units = most / per_unit if most > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(units))
    steps = (power * factor for factor in (0.2, 0.5, 1, 2))
    step = next(step for step in steps if math.ceil(units / step) <= MOST_INTERVALS)
    return LinearScale(step * per_unit, math.ceil(units / step), unit, per_unit)


def time_scale(milliseconds: float) -> LinearScale:
    """Return an axis for times in milliseconds, or in seconds from 10 s on."""
    return decimal_scale(milliseconds, "s", 1000.0) if milliseconds >= 10_000 else decimal_scale(milliseconds, "ms")


CHARACTER, ABOVE, BELOW = 7.2, 11.0, 4.0
"""Pixels of a 12-pixel text in the widest usual font: width per character, height above and below the base line."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge, in pixels."""
Place = tuple[float, float, str]
"""Anchor point (x, y) on a text's base line, and anchor ("start", "middle", "end")."""


@dataclass(frozen=True)
class Label:
    """A text, and its possible positions in order of preference."""

    words: str
    places: tuple[Place, ...]
    colour: str


def text_box(words: str, place: Place) -> Box:
    """Return the bounding box of a 12-pixel text."""
    x, y, anchor = place
    width = CHARACTER * len(words)
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    return left, y - ABOVE, left + width, y + BELOW


def overlap(one: Box, other: Box) -> bool:
    """Return True if two boxes overlap in more than an edge."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def placed(labels: Iterable[Label], taken: Iterable[Box], within: Box) -> Iterator[tuple[Label, Place]]:
    """Yield (label, position) for each label that fits in ``within`` and overlaps neither ``taken`` nor earlier
    labels."""
    boxes = list(taken)
    for label in labels:
        for place in label.places:
            box = text_box(label.words, place)
            inside = within[0] <= box[0] and within[1] <= box[1] and box[2] <= within[2] and box[3] <= within[3]
            if inside and not any(overlap(box, other) for other in boxes):
                boxes.append(box)
                yield label, place
                break
