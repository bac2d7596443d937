"""Strategies with one case a model: there is no limit to meet, they land where they land."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magis.errors import UsageError
from magis.results import Case
from magis.strategies.parts import check_parts, group_of, is_local
from pytest_magis.strategies.base import Grid

__all__ = ["Named", "Ranked"]


@dataclass(frozen=True)
class Named:
    """A strategy of one rank; nothing is searched, so neither limits nor budgets apply."""

    name: str

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]:
        if is_local(self.name):
            check_parts(self.name)
        yield self.name, Case(model, self.name, grid.device, grid.preset, dtype=grid.dtype, seed=grid.seed)


@dataclass(frozen=True)
class Ranked:
    """A distributed strategy: its case is of as many ranks as were asked for (`ddp-x4`)."""

    name: str

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]:
        group = group_of(self.name)
        if grid.ranks % group:
            raise UsageError(
                f"strategy {self.name!r} needs a multiple of {group} ranks, there are {grid.ranks}",
                hint=f"give --magis-ranks={-(-grid.ranks // group) * group}, or make its groups smaller",
            )
        case = Case(model, self.name, grid.device, grid.preset, grid.dtype, seed=grid.seed, ranks=grid.ranks)
        yield f"{self.name}-x{grid.ranks}", case
