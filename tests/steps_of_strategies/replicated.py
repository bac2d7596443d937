"""A strategy whose ranks compare after each step what all of them hold whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from magis.capture import Workload
from magis.extensions.ranks.plans.planned_ranks import PlannedRanks
from magis.strategies import World, distributed_strategy
from magis.strategies.rank_step import RankStep, RankStrategy, Wrapping

WHOLE = ("norm.weight", "norm.bias", "position.weight", "out.bias", "down.bias")
"""How the names of parameters end that no rank of a group has a part of."""


@dataclass
class Compared:
    step: RankStep

    def __post_init__(self) -> None:
        self.module: nn.Module = self.step.module

    def prepare(self) -> None:
        self.step.prepare()

    def run(self) -> Tensor | None:
        loss = self.step.run()
        named = {name: p.detach() for name, p in self.module.named_parameters() if name.endswith(WHOLE)}
        assert len(named) > len(WHOLE)
        for name, tensor in {**named, "generator": torch.get_rng_state()}.items():
            own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()
            both = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(both, own)
            assert all(torch.equal(each, own) for each in both), f"{name} differs from rank to rank"
        return loss


@dataclass(frozen=True)
class ReplicatedAlike(Wrapping):
    strategy: RankStrategy

    def prepare(self, work: Workload, world: World) -> Compared:
        return Compared(self.strategy.prepare(work, world))


def unplanned() -> ReplicatedAlike:
    return ReplicatedAlike(distributed_strategy("tp2"))


def planned() -> ReplicatedAlike:
    """Within four fifths of what the first rank needs: no plan has loops, whose sums round otherwise."""
    return ReplicatedAlike(PlannedRanks("magis+tp2", (373_000,), budget=100))
