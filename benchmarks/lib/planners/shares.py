"""The outer and the inner program of ``two_level``: shares of each layer, then a choice for each of its activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from magis.simulate.problem import KEEP, RECOMPUTE, SWAP, Bools, Int8s, Int32s

from .layers import layers
from .setting import Setting
from .solver import Program

__all__ = ["MIB", "TIE", "Item", "Layer", "Row", "TwoLevel", "inner", "outer"]

SMALLEST_OFFLOAD = 1 << 20
"""Bytes; many small transfers cost more than they save."""
TIE = 1e-3
"""Microseconds, much less than any recomputation: of shares that cost the same, those that offload least."""
OVERSHOOT = 0.05
"""How far offloaded bytes may exceed their target."""
MIB = float(1 << 20)
Choice = tuple[float, float, float]
"""Shares that are kept, recomputed, offloaded."""


@dataclass(frozen=True)
class Item:
    """One activation, as the inner program sees it."""

    nbytes: int
    redo_ns: int
    may_recompute: bool
    may_offload: bool


@dataclass(frozen=True)
class Row:
    """The peak of one pass of a layer: bytes there of what lies idle, layer by layer, and all other bytes."""

    layer: int
    fixed: int
    idle: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer, as the outer program sees it."""

    items: tuple[Item, ...]
    forward_ns: int
    backward_ns: int

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def least_kept(self) -> float:
        """The share of what can neither be recomputed nor offloaded."""
        bound = sum(item.nbytes for item in self.items if not (item.may_recompute or item.may_offload))
        return bound / max(1, self.nbytes)

    @property
    def most(self) -> tuple[float, float]:
        """The largest shares that can be recomputed, and offloaded."""
        total = max(1, self.nbytes)
        redone = sum(item.nbytes for item in self.items if item.may_recompute)
        out = sum(item.nbytes for item in self.items if item.may_offload)
        return redone / total, out / total


def outer(
    rows: Sequence[Row], every: Sequence[Layer], ns_per_byte: float, budget: float | None, tie: float = TIE
) -> tuple[list[Choice], float] | None:
    """The shares of each layer and the least cost (ns) under a budget (bytes); without one, the least budget.

    ``tie`` is what offloading all of a layer costs, in microseconds.
    """
    program = Program()
    shares: list[tuple[int, int, int]] = []
    for index, layer in enumerate(every):
        redone, out = layer.most
        out *= float(ns_per_byte > 0.0 and index < len(every) - 1)
        for ns in (layer.forward_ns, layer.backward_ns):
            if layer.nbytes and ns_per_byte > 0.0:
                out = min(out, ns / ns_per_byte / layer.nbytes)
        cost = 0.0 if budget is None else layer.forward_ns / 1000.0
        kept = program.variable(lower=layer.least_kept, upper=1.0)
        again = program.variable(cost, upper=redone)
        shares.append((kept, again, program.variable(tie * float(budget is not None), upper=out)))
        program.row([(share, 1.0) for share in shares[-1]], 1.0, 1.0)
    limit = program.variable(1.0) if budget is None else program.variable(lower=0.0, upper=budget / MIB)
    for row in rows:
        terms = [(limit, -1.0)]
        free = row.fixed + row.idle[row.layer]
        for index, nbytes in enumerate(row.idle):
            if index != row.layer:
                terms.append((shares[index][0], nbytes / MIB))
            if index == row.layer - 1:
                terms.append((shares[index][2], nbytes / MIB))
        program.row(terms, high=-free / MIB)
    found = program.solve()
    if found is None:
        return None
    total = float(found[limit]) * MIB if budget is None else float(np.dot(program.costs, found)) * 1000.0
    return [(float(found[k]), float(found[r]), float(found[o])) for k, r, o in shares], total


def inner(items: Sequence[Item], keep_bytes: float, offload_bytes: float, ns_per_byte: float) -> list[int]:
    """KEEP, RECOMPUTE or SWAP for each activation of a layer: least cost within the bytes that are kept, if need be
    the least that can be kept."""
    found = _inner(items, keep_bytes, offload_bytes, ns_per_byte)
    if found is None:
        leanest = _inner(items, None, offload_bytes, ns_per_byte) or [KEEP] * len(items)
        least = sum(item.nbytes for item, flag in zip(items, leanest, strict=True) if flag == KEEP)
        found = _inner(items, least, offload_bytes, ns_per_byte)
    return found or [KEEP] * len(items)


def _inner(
    items: Sequence[Item], keep_bytes: float | None, offload_bytes: float, ns_per_byte: float
) -> list[int] | None:
    """The choice of least cost; None: none keeps so few bytes. Without ``keep_bytes``: the one that keeps least."""
    program = Program()
    chosen: list[tuple[int, int, int]] = []
    least = keep_bytes is None
    for item in items:
        kept = program.variable(item.nbytes / MIB if least else 0.0, upper=1.0, whole=True)
        cost = 0.0 if least else item.redo_ns / 1000.0
        again = program.variable(cost, upper=float(item.may_recompute), whole=True)
        out = program.variable(upper=float(item.may_offload), whole=True)
        chosen.append((kept, again, out))
        program.row([(kept, 1.0), (again, 1.0), (out, 1.0)], 1.0, 1.0)
    price = 0.0 if least else MIB * ns_per_byte / 1000.0
    over = program.variable(price, upper=offload_bytes * OVERSHOOT / MIB)
    sizes = [item.nbytes / MIB for item in items]
    if keep_bytes is not None:
        stays = [(kept, size) for (kept, _, _), size in zip(chosen, sizes, strict=True)]
        program.row(stays, high=_target(keep_bytes))
    sent = [(out, size) for (_, _, out), size in zip(chosen, sizes, strict=True)]
    program.row([*sent, (over, -1.0)], high=_target(offload_bytes))
    found = program.solve()
    if found is None:
        return None
    return [(KEEP, RECOMPUTE, SWAP)[int(np.argmax([found[each] for each in three]))] for three in chosen]


def _target(nbytes: float) -> float:
    """In MiB, with room for rounding."""
    return nbytes * (1.0 + 1e-6) / MIB + 1e-9


class TwoLevel:
    """The program of one step.

    ``send_on``: what goes on to a later layer may be offloaded; ``tie`` as of ``outer``.
    """

    def __init__(self, setting: Setting, *, send_on: bool, tie: float = TIE) -> None:
        problem = setting.problem
        self.setting = setting
        self._tie = tie
        found = layers(setting)
        self.of_storage: Int32s = found.of_storages(setting)
        self.goes_on = _goes_on(setting, found.of_node)
        step = setting.evaluator.step
        by_node = setting.origins.random[problem.producer]
        self.fixed = self.goes_on | by_node
        may_recompute: Bools = step.redoable & ~self.fixed
        may_offload: Bools = step.swappable & (problem.nbytes >= SMALLEST_OFFLOAD) & (send_on | ~self.goes_on)
        self.members = [np.flatnonzero(setting.saved & (self.of_storage == index)) for index in range(found.count)]
        self.layers = []
        forward = setting.origins.forward
        for index, members in enumerate(self.members):
            items = tuple(
                Item(int(problem.nbytes[s]), int(problem.redo_ns[problem.producer[s]]),
                     bool(may_recompute[s]), bool(may_offload[s]))
                for s in members.tolist()
            )  # fmt: skip
            nodes = found.of_node == index
            times = (int(problem.node_ns[nodes & forward].sum()), int(problem.node_ns[nodes & ~forward].sum()))
            self.layers.append(Layer(items, *times))
        self.rows = _rows(setting, found.of_node, self.members)
        self._inner: dict[tuple[tuple[Item, ...], int, int], list[int]] = {}

    def least(self) -> float:
        """The smallest budget (bytes) that the outer program can keep."""
        found = outer(self.rows, self.layers, self.setting.problem.xfer_ns_per_byte, None)
        return float(self.setting.peak) if found is None else found[1]

    def anchored(self) -> Int8s:
        """Flags before any decision: what may not be recomputed is kept."""
        flags = self.setting.untouched.copy()
        flags[self.fixed & self.setting.origins.forward[self.setting.problem.producer]] = KEEP
        return flags

    def flags(self, budget: float) -> Int8s | None:
        """The plan for a budget of its own; None: there is none."""
        problem = self.setting.problem
        found = outer(self.rows, self.layers, problem.xfer_ns_per_byte, budget, self._tie)
        if found is None:
            return None
        flags = self.anchored()
        for layer, members, (kept, _, out) in zip(self.layers, self.members, found[0], strict=True):
            key = (layer.items, round(kept * layer.nbytes), round(out * layer.nbytes))
            if key not in self._inner:
                self._inner[key] = inner(*key, problem.xfer_ns_per_byte) if layer.items else []
            flags[members] = self._inner[key]
        return flags


def _goes_on(setting: Setting, of_node: Int32s) -> Bools:
    """[s] made in the forward pass of a layer and read in that of a later one."""
    problem, forward = setting.problem, setting.origins.forward
    found = np.zeros(problem.n_storages, dtype=np.bool_)
    for node in np.flatnonzero(forward).tolist():
        read = problem.inputs(node)
        found[read[of_node[problem.producer[read]] < of_node[node]]] = True
    return found


def _rows(setting: Setting, of_node: Int32s, members: Sequence[npt.NDArray[np.intp]]) -> list[Row]:
    """The worst moment of each layer's forward and backward pass."""
    problem, forward = setting.problem, setting.origins.forward
    rows = []
    for index in range(len(members)):
        for phase in (forward, ~forward):
            positions = np.flatnonzero((of_node == index) & phase)
            if not len(positions):
                continue
            worst = int(positions[np.argmax(setting.levels[positions])])
            lying = setting.idle(worst)
            idle = tuple(int(problem.nbytes[each[lying[each]]].sum()) for each in members)
            rows.append(Row(index, int(setting.levels[worst]) - sum(idle), idle))
    return rows
