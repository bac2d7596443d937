"""Processes that run a technique together, and what they measured."""

from magis.ranks.pool import RankPool
from magis.ranks.records import RankError, RankJob, RankReport, mean_losses, slowest_ms

__all__ = ["RankError", "RankJob", "RankPool", "RankReport", "mean_losses", "slowest_ms"]
