"""What a model is measured under: each strategy contributes cases; other projects add theirs by a hook."""

from pytest_magis.strategies.strategy import BUILT_IN, Grid, Magis, Named, Ranked, Strategy, by_name

__all__ = ["BUILT_IN", "Grid", "Magis", "Named", "Ranked", "Strategy", "by_name"]
