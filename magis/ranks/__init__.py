"""Processes that run a strategy together, and what they measured. Loads no torch: the processes do."""

from magis.ranks.agents import Agents, lead, serve
from magis.ranks.pool import RankPool
from magis.ranks.rank_hosts import Attachment, attached
from magis.ranks.records import RankError, RankJob, RankReport, check_ranks, mean_losses, slowest_ms

__all__ = [
    "Agents",
    "Attachment",
    "RankError",
    "RankJob",
    "RankPool",
    "RankReport",
    "attached",
    "check_ranks",
    "lead",
    "mean_losses",
    "serve",
    "slowest_ms",
]
