"""Round ticks of axes, and labels that do not lie on each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from magis.units import format_bytes, parse_bytes

MOST_INTERVALS = 7
"""Between ticks, of which there are 3 to 8."""


@dataclass(frozen=True)
class LinearScale:
    """An axis with round ticks, from 0 to at least the most that is drawn."""

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
        """Where a value is: 0 at the beginning of the axis, 1 at its end."""
        return value / self.end

    def number(self, tick: float) -> str:
        """What stands at a tick, without its unit."""
        return f"{tick / self.per_unit:g}"

    def words(self, tick: float) -> str:
        return f"{self.number(tick)} {self.unit}" if tick else "0"


def byte_scale(most: int) -> LinearScale:
    """Ticks a power of two apart, all in one binary unit."""
    step = 1
    while -(-most // step) > MOST_INTERVALS:
        step *= 2
    intervals = max(2, -(-most // step))
    unit = format_bytes(step * intervals).partition(" ")[2]
    return LinearScale(step, intervals, unit, parse_bytes(f"1 {unit}"))


def decimal_scale(most: float, unit: str = "", per_unit: float = 1.0) -> LinearScale:
    """Ticks 1, 2 or 5 times a power of ten apart."""
    units = most / per_unit if most > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(units))
    steps = (power * factor for factor in (0.2, 0.5, 1, 2))
    step = next(step for step in steps if math.ceil(units / step) <= MOST_INTERVALS)
    return LinearScale(step * per_unit, math.ceil(units / step), unit, per_unit)


def time_scale(milliseconds: float) -> LinearScale:
    """In milliseconds, from ten seconds on in seconds."""
    return decimal_scale(milliseconds, "s", 1000.0) if milliseconds >= 10_000 else decimal_scale(milliseconds, "ms")


CHARACTER, ABOVE, BELOW = 7.2, 11.0, 4.0
"""Pixels of a text of 12 pixels, from its base line: of the widest of usual fonts, so that there is room in any."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""
Place = tuple[float, float, str]
"""Where the base line of a text is, and which end of it is there ("start", "middle", "end")."""


@dataclass(frozen=True)
class Label:
    """A text, and where it may be, the best place first."""

    words: str
    places: tuple[Place, ...]
    colour: str


def text_box(words: str, place: Place) -> Box:
    """What a text of 12 pixels covers."""
    x, y, anchor = place
    width = CHARACTER * len(words)
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    return left, y - ABOVE, left + width, y + BELOW


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share more than an edge."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def placed(labels: Iterable[Label], taken: Iterable[Box], within: Box) -> Iterator[tuple[Label, Place]]:
    """Every label that finds room beside what is taken and the labels before it, with its place."""
    boxes = list(taken)
    for label in labels:
        for place in label.places:
            box = text_box(label.words, place)
            inside = within[0] <= box[0] and within[1] <= box[1] and box[2] <= within[2] and box[3] <= within[3]
            if inside and not any(overlap(box, other) for other in boxes):
                boxes.append(box)
                yield label, place
                break
