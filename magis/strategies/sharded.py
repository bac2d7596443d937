"""`fsdp`: torch's `fully_shard` on every block and on the rest, which frees each block's weights after its forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from magis.capture import Workload
from magis.strategies.base import World, share_of_batch
from magis.strategies.common import PlainStep, half, make_optimizer, mesh, quiet, trained

__all__ = ["FullyShard"]


@dataclass(frozen=True)
class FullyShard:
    """`fsdp`: float32 weights, gradients and optimizer state, every parameter cut along its first dimension.

    Bytes per parameter with Adam on R ranks: 16/R, and a block's weights whole while it runs. ``amp``: the same, with
    blocks gathered and gradients reduced in the lower type (`MixedPrecisionPolicy`). What is in no block is whole from
    the start of the forward to the end of the backward.
    """

    amp: bool = False

    warm_steps = 1

    @property
    def name(self) -> str:
        return "amp+fsdp" if self.amp else "fsdp"

    @property
    def group(self) -> int:
        return 1

    def prepare(self, work: Workload, world: World) -> PlainStep:
        """The step on this rank's share of the batch."""
        ranks = mesh(world, {"dp": world.size})
        work = share_of_batch(work, world.rank, world.size)
        module = work.module
        policy = MixedPrecisionPolicy(param_dtype=half(world)) if self.amp else MixedPrecisionPolicy()
        with quiet():
            for block in work.blocks:
                fully_shard(module.get_submodule(block), mesh=ranks, mp_policy=policy)
            fully_shard(module, mesh=ranks, mp_policy=policy)
        optimizer = make_optimizer(work, trained(module), self.name)
        return PlainStep(module, work, optimizer, world, self.amp, module, autocast=False)
