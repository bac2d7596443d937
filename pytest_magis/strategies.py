"""Strategies of the plugin: each has a name and plans the cases of a model; other plugins add theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from magis.errors import UsageError
from magis.results import Case
from magis.strategies.strategy_names import (
    LISTED,
    PLANNED_CODE,
    RESERVED,
    accumulated,
    allocator_text,
    check_limit_of,
    check_parts,
    family,
    group_of,
    is_local,
)
from magis.units import in_one_word
from pytest_magis.flags import Settings


@dataclass(frozen=True)
class Named:
    """Strategy on one rank without a search: one case per model, without limits or budgets."""

    name: str

    def cases(self, model: str, grid: Settings) -> Iterator[tuple[str, Case]]:
        if is_local(self.name):
            check_parts(self.name)
        yield self.name, case_of(grid, model, self.name)


@dataclass(frozen=True)
class Ranked:
    """Distributed strategy: one case on the given number of ranks (`ddp-x4`).

    If its ranks run a plan: one case per limit (`magis+fsdp-x2-mem0.8`), a share of a rank's peak without a plan.
    """

    name: str

    def cases(self, model: str, grid: Settings) -> Iterator[tuple[str, Case]]:
        group = group_of(self.name)
        if grid.ranks % group:
            raise UsageError(
                f"strategy {self.name!r} needs a multiple of {group} ranks, there are {grid.ranks}",
                hint=f"give --magis-ranks={-(-grid.ranks // group) * group}, or make its groups smaller",
            )
        if not self.name.startswith("magis+"):
            name = accumulated(self.name, grid.accumulate)
            yield f"{name}-x{grid.ranks}", replace(case_of(grid, model, name), ranks=grid.ranks)
            return
        _refuse_bytes(self.name, grid)
        label = f"{self.name}-x{grid.ranks}"
        for ratio in grid.memory_ratios:
            case = replace(searched_case(grid, model, self.name), ranks=grid.ranks, memory_ratio=ratio)
            yield f"{label}-mem{ratio:.12g}", case


@dataclass(frozen=True)
class Magis:
    """Strategy of the planned step: one case per limit, `magis-mem0.8` and `magis-lat1.1`, memory limits first.

    Labels are `magis-paper-mem0.8` with the paper's search, `magis-mem0.8-reserved` with a limit on reserved bytes.
    "magis+amp" runs both steps, original and planned, under autocast; limits are shares of the original's peak.
    """

    name: str = "magis"

    def cases(self, model: str, grid: Settings) -> Iterator[tuple[str, Case]]:
        if self.name == PLANNED_CODE:
            _refuse_bytes(self.name, grid)
        dtype = grid.dtype
        if self.name != "magis" and dtype in (None, "float32"):
            dtype = "amp-bfloat16" if grid.device == "cpu" else "amp-float16"  # as torch.autocast by itself
        elif self.name != "magis" and not str(dtype).startswith("amp-"):
            raise UsageError(
                f"strategy {self.name!r} casts float32 weights, those asked for are {dtype}",
                hint="leave out --magis-dtype",
            )
        for search in grid.search:
            label = self.name if search == "magis" else f"{self.name}-{search}"
            case = replace(searched_case(grid, model, self.name), search=search, dtype=dtype)
            by_limit: dict[str, dict[str, Any]] = {
                f"mem{ratio:.12g}": {"memory_ratio": ratio} for ratio in grid.memory_ratios
            }
            by_limit |= {f"mem{in_one_word(nbytes)}": {"memory_limit": nbytes} for nbytes in grid.memory_limits}
            what = grid.memory_limit_of
            for name, limit in by_limit.items():
                check_limit_of(what, self.name, grid.device)
                reserved = f"-{what}" if what == RESERVED else ""
                yield f"{label}-{name}{reserved}", replace(case, memory_limit_of=what, **limit)
            for ratio in grid.latency_ratios:
                yield f"{label}-lat{ratio:.12g}", replace(case, latency_ratio=ratio)


def case_of(settings: Settings, model: str, strategy: str) -> Case:
    """Create the case of a strategy without a search. Settings of the allocator hold for strategies of one device."""
    is_single = family(strategy) in ("original", "plan", "local")
    return Case(
        model,
        strategy,
        settings.device,
        settings.preset,
        settings.dtype,
        seed=settings.seed,
        slack=settings.slack,
        host_limit=settings.host_limit,
        allocator=allocator_text(settings.allocator, settings.device) if is_single else "",
    )


def searched_case(settings: Settings, model: str, strategy: str) -> Case:
    """Create the case of a strategy with a search, without a limit."""
    return replace(case_of(settings, model, strategy), budget=settings.budget, seconds=settings.seconds)


def _refuse_bytes(name: str, settings: Settings) -> None:
    """Raise UsageError for a limit in bytes, for strategies whose limits are shares of a peak other than eager's."""
    if settings.memory_limits:
        raise UsageError(f"strategy {name!r} takes no memory_limit", hint="give memory_ratios")


class Strategy(Protocol):
    """Way to run a model. `cases` must yield the same (label, case) pairs in the same order every time.

    A label is in the node id (`magis::bert[label]`) and in baselines: it begins with the strategy's name and is unique
    among the model's cases.
    """

    @property
    def name(self) -> str: ...

    def cases(self, model: str, grid: Settings) -> Iterator[tuple[str, Case]]: ...


def by_name(name: str) -> Strategy | None:
    """Return a strategy by name, combinations included ("amp+checkpoint", "tp4+pp2"); None if the name is unknown."""
    kind = family(name)
    if kind is None:
        return None
    if kind == "plan" or name == PLANNED_CODE:
        return Magis(name)
    return Ranked(name) if kind == "distributed" else Named(name)


BUILT_IN: tuple[Strategy, ...] = tuple(found for found in map(by_name, LISTED) if found is not None)
"""Built-in strategies."""
