"""What a model is measured under: each strategy contributes cases; other projects add theirs by a hook."""

from pytest_magis.strategies.base import Grid, Strategy
from pytest_magis.strategies.checkpoint import Checkpoint
from pytest_magis.strategies.eager import Eager
from pytest_magis.strategies.magis import Magis

__all__ = ["BUILT_IN", "Checkpoint", "Eager", "Grid", "Magis", "Strategy"]

BUILT_IN: tuple[Strategy, ...] = (Eager(), Magis(), Checkpoint())
