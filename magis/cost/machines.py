"""Machines that a plan must stand: the one that the constants describe, and others that are a little away from it.

On a real machine the host link is seldom as fast, and kernels are seldom as slow, as a model of them says. A copy that
just fits between two operators is then late, and the step waits for it. With a *slack* s the link may be slower by the
share s, and kernels may be quicker by half of it, or both:

    link (1 - s) times as fast, kernels in (1 - s / 2) of their time

In units of the kernels' time both together make every copy 1 / ((1 - s) (1 - s / 2)) times as long, what a copy takes
besides its bytes 1 / (1 - s / 2) times. That machine is the worst one: whoever waits for no copy there waits for none
on any machine between it and the nominal one, since a shorter copy lets nothing begin later. So a search that plans
with copies of that length judges a plan under all the machines at once, at the price of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from magis.graph.nodes import Op, Value


class Times(Protocol):
    """Times of calls, and of copies to and from the host (0 bytes a second: there are none)."""

    @property
    def link_bytes_per_s(self) -> float: ...
    @property
    def copy_ns(self) -> int: ...
    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int: ...


@dataclass(frozen=True)
class Machine:
    """A device whose link is `link` times as fast, and whose kernels take `kernels` times as long."""

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
    """Return the link's speed and the kernels' time on the worst machine of a slack, in units of the nominal ones."""
    return 1 - slack, 1 - slack / 2


def machines(times: Times, slack: float) -> tuple[Machine, ...]:
    """Return the nominal machine, the one with a slower link, the one with quicker kernels, and the one with both."""
    link, kernels = worst_factors(slack)
    return Machine(times), Machine(times, link), Machine(times, kernels=kernels), Machine(times, link, kernels)
