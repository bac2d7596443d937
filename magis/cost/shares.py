"""What the latency of a step rests on: which share of it was measured, interpolated, or estimated by a roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magis.cost.loops import MERGING
from magis.cost.model import CostModel
from magis.cost.prices import ESTIMATED, INTERPOLATED, MEASURED, Price
from magis.ir.types import Graph

__all__ = ["Shares", "shares"]


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a step's time by where they are from; they add up to 1."""

    measured: float = 0.0
    interpolated: float = 0.0
    estimated: float = 1.0
    error: float = 0.0
    """By which share the interpolated part is typically off."""


def shares(costs: CostModel, graph: Graph) -> Shares:
    """The shares of a graph's operators, those of loops counted for every part; what the host does is left out."""
    prices = [(times * price.ns, price) for times, price in _prices(costs, graph, 1)]
    total = sum(ns for ns, _ in prices)
    if not total:
        return Shares()
    spent = {source: sum(ns for ns, price in prices if price.source == source) for source in _SOURCES}
    off = sum(ns * price.error for ns, price in prices if price.source == INTERPOLATED)
    interpolated = spent[INTERPOLATED]
    return Shares(
        measured=spent[MEASURED] / total,
        interpolated=interpolated / total,
        estimated=spent[ESTIMATED] / total,
        error=off / interpolated if interpolated else 0.0,
    )


_SOURCES = (MEASURED, INTERPOLATED, ESTIMATED)


def _prices(costs: CostModel, graph: Graph, times: int) -> Iterator[tuple[int, Price]]:
    for op in graph.ops:
        if op.body is not None:
            yield from _prices(costs, op.body.graph, times * op.body.parts)
        elif op.target in MERGING or not op.target.startswith("magis."):
            yield times, costs.price(op, graph.values)
