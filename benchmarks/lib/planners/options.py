"""A stronger outer program for ``two_level``: it chooses from whole options of each layer, at what they cost.

The options of a layer are the inner program's choices for a grid of targets; the rows are those of the shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from magis.simulate.problem import KEEP, RECOMPUTE, SWAP, Int8s

from .shares import MIB, Item, Layer, Row, TwoLevel, inner
from .solver import Program

__all__ = ["ByOptions", "Option", "choose", "options"]

KEPT = 8
"""Targets between nothing and everything kept, by equal steps."""
SENT = 2
"""The same of offloading, up to what the link allows."""
GAP = 0.01
"""Relative, of the outer program: of equal layers, proofs that nothing is better take minutes."""
NODES = 200
"""The same, of branch and bound."""


@dataclass(frozen=True)
class Option:
    """Decisions for the activations of a layer."""

    kept: int
    sent: int
    ns: int
    """Of what is recomputed."""
    flags: tuple[int, ...]


def options(layer: Layer, ns_per_byte: float, *, last: bool) -> tuple[Option, ...]:
    """The undominated ones of a layer, most kept first; none is offloaded in the last layer."""
    room = 0.0
    if ns_per_byte > 0.0 and not last:
        room = min(float(layer.nbytes), min(layer.forward_ns, layer.backward_ns) / ns_per_byte)
    found = {option(layer.items, [KEEP] * len(layer.items))}
    for kept, sent in itertools.product(range(KEPT + 1), range(SENT + 1 if room else 1)):
        flags = inner(layer.items, layer.nbytes * kept / KEPT, room * sent / SENT, ns_per_byte)
        found.add(option(layer.items, flags))
    every = sorted(found, key=lambda each: (-each.kept, each.ns, each.sent, each.flags))
    return tuple(one for one in every if not any(_better(other, one) for other in every))


def option(items: Sequence[Item], flags: Sequence[int]) -> Option:
    """What decisions cost."""
    pairs = list(zip(items, flags, strict=True))
    return Option(
        kept=sum(item.nbytes for item, flag in pairs if flag == KEEP),
        sent=sum(item.nbytes for item, flag in pairs if flag == SWAP),
        ns=sum(item.redo_ns for item, flag in pairs if flag == RECOMPUTE),
        flags=tuple(flags),
    )


def _better(one: Option, other: Option) -> bool:
    """Nowhere worse and somewhere better."""
    first, second = (one.kept, one.sent, one.ns), (other.kept, other.sent, other.ns)
    return first != second and all(mine <= its for mine, its in zip(first, second, strict=True))


def choose(
    rows: Sequence[Row],
    sizes: Sequence[int],
    every: Sequence[Sequence[Option]],
    budget: float | None,
    gap: float = GAP,
) -> tuple[list[Option], float] | None:
    """One option of each layer, of least time (ns) under a budget (bytes); without one, of the least budget.

    A row counts of a layer's idle bytes there the share that the option keeps of the layer's bytes, ``sizes``.
    """
    program = Program()
    taken: list[list[int]] = []
    for mine in every:
        costs = [0.0 if budget is None else each.ns / 1000.0 for each in mine]
        taken.append([program.variable(cost, upper=1.0, whole=True) for cost in costs])
        program.row([(variable, 1.0) for variable in taken[-1]], 1.0, 1.0)
    limit = program.variable(1.0) if budget is None else program.variable(upper=budget / MIB)
    for row in rows:
        terms = [(limit, -1.0)]
        for index, idle in enumerate(row.idle):
            for variable, each in zip(taken[index], every[index], strict=True):
                held = each.kept if index != row.layer else 0
                held += each.sent if index == row.layer - 1 else 0
                terms.append((variable, idle * held / max(1, sizes[index]) / MIB))
        program.row(terms, high=-(row.fixed + row.idle[row.layer]) / MIB)
    found = program.solve(gap, NODES if gap else 20 * NODES)
    if found is None:
        return None
    best = [each[int(np.argmax(found[numbers]))] for numbers, each in zip(taken, every, strict=True)]
    return best, float(found[limit]) * MIB if budget is None else float(sum(each.ns for each in best))


class ByOptions:
    """The program of one step, with the layers and rows of the shares."""

    def __init__(self, program: TwoLevel) -> None:
        self.program = program
        known: dict[tuple[Layer, bool], tuple[Option, ...]] = {}
        self.sizes = [layer.nbytes for layer in program.layers]
        self.options: list[tuple[Option, ...]] = []
        for index, layer in enumerate(program.layers):
            key = layer, index == len(program.layers) - 1
            if key not in known:
                known[key] = options(layer, program.setting.problem.xfer_ns_per_byte, last=key[1])
            self.options.append(known[key])

    def least(self) -> float:
        """The smallest budget (bytes) that the outer program can keep."""
        found = choose(self.program.rows, self.sizes, self.options, None)
        return float(self.program.setting.peak) if found is None else found[1]

    def flags(self, budget: float) -> Int8s | None:
        """The plan for a budget of its own; None: there is none."""
        found = choose(self.program.rows, self.sizes, self.options, budget)
        if found is None:
            return None
        flags = self.program.anchored()
        for members, each in zip(self.program.members, found[0], strict=True):
            flags[members] = each.flags
        return flags
