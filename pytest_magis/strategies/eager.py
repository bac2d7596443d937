"""The un-optimized step: the real module with autograd and an unfused optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magis.results import Case
from pytest_magis.strategies.base import Grid

__all__ = ["Eager"]


@dataclass(frozen=True)
class Eager:
    """One case a model: nothing is searched, so neither limits nor budgets apply."""

    name: str = "eager"

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]:
        yield self.name, Case(model, self.name, grid.device, grid.preset, dtype=grid.dtype, seed=grid.seed)
