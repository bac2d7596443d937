"""What a strategy is: a name, and the cases that it contributes for a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from magis.results import Case

__all__ = ["Grid", "Strategy"]


@dataclass(frozen=True)
class Grid:
    """What was asked for all models alike; the fields mean what they mean in `magis.results.Case`."""

    device: str
    preset: str
    dtype: str | None = None
    memory_ratios: tuple[float, ...] = ()
    latency_ratios: tuple[float, ...] = ()
    searches: tuple[str, ...] = ("magis",)
    budget: int | None = None
    seconds: float | None = None
    seed: int = 0
    ranks: int = 1


class Strategy(Protocol):
    """A way to run a model. `cases` must yield the same (label, case) pairs in the same order every time.

    A label is what stands in brackets in the node id (`magis::bert[label]`) and what baselines are kept under: it
    starts with the strategy's name and is unique among the model's cases.
    """

    @property
    def name(self) -> str: ...

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]: ...
