"""Activation checkpointing per block: what a user would reach for first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magis.results import Case
from pytest_magis.strategies.base import Grid

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """One case a model: checkpointing has no limit to meet, it lands where it lands."""

    name: str = "checkpoint"

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]:
        yield self.name, Case(model, self.name, grid.device, grid.preset, dtype=grid.dtype, seed=grid.seed)
