"""Machines for which a plan must hold: the nominal one of the device constants, and slightly different ones.

On real machines the host link is often slower, and kernels are often faster, than a model predicts. A copy that just
fits between two operators is then late, and the step waits for it. With a *slack* s the link may be slower by the
fraction s, kernels may be faster by half of that fraction, or both:

    link bandwidth times (1 - s), kernel times times (1 - s / 2)

Relative to kernel times, both together make a copy's transfer 1 / ((1 - s) (1 - s / 2)) times as long, and its fixed
cost 1 / (1 - s / 2) times. This is the worst machine: a plan that never waits for a copy there never waits on any
machine between it and the nominal one, since a shorter copy delays nothing. So a search with these copy times covers
all of these machines at the price of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from magis.graph.nodes import Op, Value


class Times(Protocol):
    """Protocol for times of calls, and of host copies (link of 0 bytes per second: no copies)."""

    @property
    def link_bytes_per_s(self) -> float: ...
    @property
    def copy_ns(self) -> int: ...
    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int: ...


HALF = 0.5
"""Share of the link's speed with which a plan is judged, too, whatever its slack."""


@dataclass(frozen=True)
class Machine:
    """A device with its link bandwidth scaled by `link`, and its kernel times by `kernels`."""

    times: Times
    link: float = 1.0
    kernels: float = 1.0

    @property
    def link_bytes_per_s(self) -> float:
        return self.times.link_bytes_per_s * self.link

    @property
    def copy_ns(self) -> int:
        return self.times.copy_ns

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        return round(self.times.nanoseconds(op, values) * self.kernels)


def worst_factors(slack: float) -> tuple[float, float]:
    """Return the factors of link bandwidth and kernel times on the worst machine of a slack."""
    return 1 - slack, 1 - slack / 2


def machines(times: Times, slack: float) -> tuple[Machine, ...]:
    """Return the nominal machine, one with a slower link, one with faster kernels, and one with both."""
    link, kernels = worst_factors(slack)
    return Machine(times), Machine(times, link), Machine(times, kernels=kernels), Machine(times, link, kernels)
