"""What a model is measured under: each strategy contributes cases; other projects add theirs by a hook."""

from pytest_magis.strategies.base import Grid, Strategy
from pytest_magis.strategies.built_in import BUILT_IN, by_name
from pytest_magis.strategies.magis import Magis
from pytest_magis.strategies.named import Named, Ranked

__all__ = ["BUILT_IN", "Grid", "Magis", "Named", "Ranked", "Strategy", "by_name"]
