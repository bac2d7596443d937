"""Processes that run a distributed strategy, and their measurements. Does not import torch; the processes do."""

from magis.extensions.ranks.processes.agents import Agents, lead, serve
from magis.extensions.ranks.processes.pool import RankPool
from magis.extensions.ranks.processes.rank_hosts import Attachment, attached
from magis.extensions.ranks.processes.records import (
    RankError,
    RankJob,
    RankReport,
    check_ranks,
    mean_losses,
    slowest_ms,
)

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
