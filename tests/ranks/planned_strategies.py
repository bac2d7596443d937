"""Ranks that plan and do not agree: beside own_strategies.py, since the planner takes seconds to import."""

from __future__ import annotations

from torch import nn

from magis.capture import Workload
from magis.planner.planned_ranks import PlannedRanks
from magis.strategies.rank_step import World


class Unlike(PlannedRanks):
    def own_part(self, work: Workload, world: World) -> Workload:
        if world.rank:
            work.module.append(nn.Linear(10, 10))  # type: ignore[operator]
        return super().own_part(work, world)


class Unable(PlannedRanks):
    def own_part(self, work: Workload, world: World) -> Workload:
        found = super().own_part(work, world)
        if world.rank:
            found.module.register_forward_pre_hook(lambda _module, args: args[0].tolist() and None)
        return found


def of_another_width() -> PlannedRanks:
    """Whose second rank has another network."""
    return Unlike("magis+ddp", budget=100)


def not_captured() -> PlannedRanks:
    """Whose second rank reads its batch."""
    return Unable("magis+ddp", budget=100)
