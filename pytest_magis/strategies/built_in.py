"""The strategies that come with the plugin."""

from __future__ import annotations

from magis.strategies.parts import LISTED, PLANNED_CODE, family
from pytest_magis.strategies.base import Strategy
from pytest_magis.strategies.magis import Magis
from pytest_magis.strategies.named import Named, Ranked

__all__ = ["BUILT_IN", "by_name"]


def by_name(name: str) -> Strategy | None:
    """The strategy that a name stands for, combinations included ("amp+checkpoint", "tp4+pp2"); None for no name."""
    kind = family(name)
    if kind is None:
        return None
    if kind == "plan" or name == PLANNED_CODE:
        return Magis(name)
    return Ranked(name) if kind == "distributed" else Named(name)


BUILT_IN: tuple[Strategy, ...] = tuple(found for found in map(by_name, LISTED) if found is not None)
