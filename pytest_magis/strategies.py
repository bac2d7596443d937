"""Strategies of the plugin: a name and the cases that it makes of a model; other projects add theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from magis.errors import UsageError
from magis.results import Case
from magis.strategies.strategy_names import (
    LISTED,
    PLANNED_CODE,
    RESERVED,
    accumulated,
    check_limit_of,
    check_parts,
    family,
    group_of,
    is_local,
)


@dataclass(frozen=True)
class Named:
    """A strategy of one rank without a search: one case per model, and neither limits nor budgets."""

    name: str

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]:
        if is_local(self.name):
            check_parts(self.name)
        yield self.name, grid.case(model, self.name)


@dataclass(frozen=True)
class Ranked:
    """A distributed strategy: one case on the asked number of ranks (`ddp-x4`).

    If its ranks run a plan: one case per memory limit (`magis+fsdp-x2-mem0.8`), a share of a rank's peak without plan.
    """

    name: str

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]:
        group = group_of(self.name)
        if grid.ranks % group:
            raise UsageError(
                f"strategy {self.name!r} needs a multiple of {group} ranks, there are {grid.ranks}",
                hint=f"give --magis-ranks={-(-grid.ranks // group) * group}, or make its groups smaller",
            )
        if not self.name.startswith("magis+"):
            name = accumulated(self.name, grid.accumulate)
            yield f"{name}-x{grid.ranks}", replace(grid.case(model, name), ranks=grid.ranks)
            return
        label = f"{self.name}-x{grid.ranks}"
        for ratio in grid.memory_ratios:
            case = replace(grid.searched(model, self.name), ranks=grid.ranks, memory_ratio=ratio)
            yield f"{label}-mem{ratio:.12g}", case


@dataclass(frozen=True)
class Magis:
    """The planned step: one case per limit, `magis-mem0.8` and `magis-lat1.1`, memory limits first.

    With the paper's search `magis-paper-mem0.8`, with a limit of reserved bytes `magis-mem0.8-reserved`. "magis+amp"
    plans the step under autocast, which then is the original, too: limits are shares of its peak.
    """

    name: str = "magis"

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]:
        for search in grid.searches:
            label = self.name if search == "magis" else f"{self.name}-{search}"
            what = grid.memory_limit_of
            for ratio in grid.memory_ratios:
                check_limit_of(what, self.name, grid.device)
                case = replace(self._case(search, model, grid), memory_ratio=ratio, memory_limit_of=what)
                yield f"{label}-mem{ratio:.12g}{f'-{what}' if what == RESERVED else ''}", case
            for ratio in grid.latency_ratios:
                yield f"{label}-lat{ratio:.12g}", replace(self._case(search, model, grid), latency_ratio=ratio)

    def _case(self, search: str, model: str, grid: Grid) -> Case:
        return replace(grid.searched(model, self.name), search=search, dtype=self._dtype(grid))

    def _dtype(self, grid: Grid) -> str | None:
        if self.name == "magis":
            return grid.dtype
        if grid.dtype not in (None, "float32") and not str(grid.dtype).startswith("amp-"):
            raise UsageError(
                f"strategy {self.name!r} casts float32 weights, those asked for are {grid.dtype}",
                hint="leave out --magis-dtype",
            )
        default = "amp-bfloat16" if grid.device == "cpu" else "amp-float16"  # as torch.autocast by itself
        return grid.dtype if grid.dtype not in (None, "float32") else default


@dataclass(frozen=True)
class Grid:
    """Options that hold for all models; the fields mean what they mean in `magis.results.Case`."""

    device: str
    preset: str
    dtype: str | None = None
    memory_ratios: tuple[float, ...] = ()
    memory_limit_of: str = "peak"
    latency_ratios: tuple[float, ...] = ()
    searches: tuple[str, ...] = ("magis",)
    budget: int | None = None
    seconds: float | None = None
    seed: int = 0
    ranks: int = 1
    accumulate: int = 1
    """Number of micro-batches of distributed strategies."""
    slack: float = Case.slack

    def case(self, model: str, strategy: str) -> Case:
        """Make the case of a strategy without a search."""
        return Case(model, strategy, self.device, self.preset, self.dtype, seed=self.seed, slack=self.slack)

    def searched(self, model: str, strategy: str) -> Case:
        """Make the case of a search, still without a limit."""
        return replace(self.case(model, strategy), budget=self.budget, seconds=self.seconds)


class Strategy(Protocol):
    """A way to run a model. `cases` must yield the same (label, case) pairs in the same order every time.

    A label stands in brackets in the node id (`magis::bert[label]`) and names the case in baselines: it begins with the
    strategy's name and is unique among the model's cases.
    """

    @property
    def name(self) -> str: ...

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]: ...


def by_name(name: str) -> Strategy | None:
    """Return the strategy of a name, combinations included ("amp+checkpoint", "tp4+pp2"); None for an unknown one."""
    kind = family(name)
    if kind is None:
        return None
    if kind == "plan" or name == PLANNED_CODE:
        return Magis(name)
    return Ranked(name) if kind == "distributed" else Named(name)


BUILT_IN: tuple[Strategy, ...] = tuple(found for found in map(by_name, LISTED) if found is not None)
"""The strategies that come with the plugin."""
