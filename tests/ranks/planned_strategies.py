"""Ranks that plan and do not agree: beside own_strategies.py, since the planner takes seconds to import."""

from __future__ import annotations

import os
import signal

from torch import nn

from magis.capture import Workload
from magis.extensions.ranks.plans import agreed_plans
from magis.extensions.ranks.plans.planned_ranks import PlannedRanks, PlannedStep
from magis.planner.plans import Plan
from magis.planner.subject import Subject
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


class Dying(PlannedRanks):
    def planned(self, subject: Subject, rank: int = 0) -> Plan:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().planned(subject, rank)


class Misreading(PlannedRanks):
    def prepare(self, work: Workload, world: World) -> PlannedStep:
        usual = agreed_plans.digest
        agreed_plans.digest = lambda graph: usual(graph) + ("" if world.rank == 0 else "!")  # type: ignore[attr-defined]
        try:
            return super().prepare(work, world)
        finally:
            agreed_plans.digest = usual  # type: ignore[attr-defined]


def dies_while_planning() -> PlannedRanks:
    """Whose first rank is killed as it searches."""
    return Dying("magis+ddp", budget=100)


def reads_another_plan() -> PlannedRanks:
    """Whose second rank gets other than what the first one sent."""
    return Misreading("magis+ddp", budget=100)
