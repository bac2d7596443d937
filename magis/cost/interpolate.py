"""Between measured sizes: the time of an operator that a profile does not know, from its measured kin.

Kin are calls of one operator that differ in sizes alone: the same data types, orders of strides and literals that are
no sizes. A roofline (`magis.cost.operator_latency`) says how sizes change the time, the profile by how much this kernel
misses it:

    time = roofline * r        r: measured / roofline, drawn straight between the nearest kin on either side

Beyond the smallest and the largest kin r stays as it is at the end, up to REACH times as far; further out, and with
fewer than LEAST kin, nothing is said. How far off such an answer may be is tried out on the kin themselves: each is
left out once and asked for (`error`, the median). Sums, products and quotients alone: the same on every machine.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from magis.graph.nodes import Arg, Const, Op, Ref, Value

LEAST = 3
"""Kin that it takes: one can be left out and asked for, between or beside two others."""
REACH = 4
"""Beyond the measured sizes, in times of the roofline."""
SMALL = 8
_WEIGHT = {"convolution": 1, "convolution_backward": 2}
FARTHEST = 2.0
"""An error above this says that the kin have nothing in common."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Nanoseconds, and the share by which they are typically off."""

    ns: int
    error: float


@dataclass(frozen=True)
class Curve:
    """The kin of one kind: roofline and measured nanoseconds, by rising roofline."""

    points: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, points: Sequence[tuple[int, int]]) -> Curve:
        """Kin of equal roofline count once, as their median."""
        known: dict[int, list[int]] = {}
        for expected, seen in points:
            known.setdefault(max(1, expected), []).append(seen)
        return cls(tuple((expected, statistics.median_low(seen)) for expected, seen in sorted(known.items())))

    def at(self, expected: int) -> Answer | None:
        """The time of a call whose roofline is `expected` nanoseconds; None where the kin do not tell."""
        if len(self.points) < LEAST or self.error > FARTHEST:
            return None
        ends = self.points[0][0], self.points[-1][0]
        if expected * REACH < ends[0] or expected > ends[1] * REACH:
            return None
        return Answer(_drawn(self.points, expected), self.error)

    @cached_property
    def error(self) -> float:
        """Median share by which a measured call is missed when it is left out."""
        missed = []
        for position, (expected, seen) in enumerate(self.points):
            others = self.points[:position] + self.points[position + 1 :]
            if others and seen:
                missed.append(abs(_drawn(others, expected) - seen) / seen)
        return statistics.median(missed) if missed else FARTHEST


def _drawn(points: Sequence[tuple[int, int]], expected: int) -> int:
    """On the line between the neighbours, exactly; beyond the ends in the ratio of the last one."""
    right = bisect_left(points, (expected, 0))
    low = points[max(0, right - 1)]
    high = points[min(right, len(points) - 1)]
    ratio = Fraction(low[1], low[0])
    if high[0] > low[0]:
        ratio += (Fraction(high[1], high[0]) - ratio) * Fraction(expected - low[0], high[0] - low[0])
    return round(expected * ratio)


def kin(op: Op, values: Mapping[int, Value]) -> str:
    """What calls that differ in sizes alone have in common, as a text.

    Whole numbers above SMALL count as sizes, smaller ones as dimensions, strides or paddings, which make another
    kernel; so does the window of a convolution. Truth values, names and types are kept.
    """
    parts = [_text(arg, values) for arg in op.args]
    parts += [f"{name}={_text(arg, values)}" for name, arg in op.kwargs]
    return f"{op.target}({', '.join(parts)}){_window(op, values)}"


def _text(arg: Arg, values: Mapping[int, Value]) -> str:
    match arg:
        case Ref(value):
            return _tensor(values[value])
        case bool() | str() | None:
            return repr(arg)
        case int():
            return repr(arg) if abs(arg) <= SMALL else "#"
        case float():
            return "#"
        case tuple():
            return f"[{', '.join(_text(item, values) for item in arg)}]"
        case Const(kind, name):
            return f"{kind}:{name}" if kind == "dtype" else kind
        case _:
            return "$"


def _tensor(value: Value) -> str:
    """Data type, and the dimensions from the slowest to the fastest: those of size 1 first, repeated ones marked."""
    sizes = list(zip(value.shape, value.stride, strict=True))
    order = sorted(range(len(sizes)), key=lambda at: (sizes[at][0] > 1, -sizes[at][1], at))
    marks = [f"{at}x" if sizes[at][0] > 1 and sizes[at][1] == 0 else str(at) for at in order]
    fastest = min((stride for size, stride in sizes if size > 1 and stride), default=1)
    return f"{value.dtype}[{' '.join(marks)}{'' if fastest == 1 else ' apart'}]"


def _window(op: Op, values: Mapping[int, Value]) -> str:
    """The sizes that a convolution's weight has in space; nothing of other operators."""
    at = _WEIGHT.get(op.target.split(".")[1] if "." in op.target else "")
    if at is None or at >= len(op.args):
        return ""
    weight = op.args[at]
    return f" {values[weight.value].shape[2:]}" if isinstance(weight, Ref) else ""
