"""Data parallelism: `ddp` and its variants with whole float32 weights, and `fsdp` by torch's `fully_shard`.

`ddp` is `DistributedDataParallel`. `oss` adds `ZeroRedundancyOptimizer`: each parameter's optimizer state is on one
rank, which updates the parameter and broadcasts it (fairscale's OSS). `oss+sdp` also reduces each gradient only to that
rank, during the backward, and frees it on all others (fairscale's ShardedDataParallel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from magis.capture import Workload
from magis.extensions.ranks.strategies.distributed import (
    BUCKET_BYTES,
    PlainStep,
    half,
    make_optimizer,
    mesh,
    of_kind,
    quiet,
    trained,
)
from magis.strategies.rank_step import World, share_of_batch

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

FIRST_BUCKET_BYTES = 2**20
"""Size in bytes of the bucket that is ready first: torch's default."""


@dataclass(frozen=True)
class Replicated:
    """Strategy `ddp`, `oss` or `oss+sdp`: whole float32 weights on every rank; ``amp`` is autocast.

    Bytes per parameter with Adam on R ranks: ddp 4 weights + 4 gradients + 4 buckets + 8 state; oss the same with 8/R
    state; oss+sdp 4 weights + 4/R gradients + 8/R state.
    """

    plain: str
    amp: bool = False

    group = 1

    @property
    def name(self) -> str:
        return f"amp+{self.plain}" if self.amp else self.plain

    @property
    def warm_steps(self) -> int:
        """Number of warm-up steps until buckets are final: DistributedDataParallel rebuilds them in the second step."""
        return 1 if self.plain == "oss+sdp" else 2

    def prepare(self, work: Workload, world: World) -> PlainStep:
        """Return the step on this rank's share of the batch."""
        module = work.module
        work = share_of_batch(work, world.rank, world.size)
        optimizer = make_optimizer(work, trained(module), self.name)
        if self.plain == "oss+sdp":
            sharded = _sharded(optimizer)
            release = _reduce_to_owners(sharded, world)
            return PlainStep(module, work, sharded, world, self.amp, module, after_backward=release)
        with quiet():
            call = BucketedReplica(module) if world.fake else DistributedDataParallel(module)
        if self.plain == "oss":
            optimizer = _sharded(optimizer)
        return PlainStep(module, work, optimizer, world, self.amp, call)


def _sharded(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    """Return a ZeroRedundancyOptimizer of the same kind, with the state of each parameter on one rank."""
    groups = [{k: v for k, v in group.items() if k != "foreach"} for group in optimizer.param_groups if group["params"]]
    with quiet():  # the import warns, too
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, optimizer_class=type(optimizer), foreach=False)


def _reduce_to_owners(optimizer: ZeroRedundancyOptimizer, world: World) -> Callable[[], None]:
    """Register hooks that reduce each gradient to the rank that owns its parameter, and free it on all others.

    Returns a function that waits for the reductions.
    """
    owners: dict[Tensor, int] = cast("Any", optimizer)._param_to_rank
    pending: list[tuple[Tensor, Any]] = []

    def reduce(parameter: Tensor) -> None:
        grad = cast("Tensor", parameter.grad)
        grad.div_(world.size)
        owner = owners[parameter]
        work = dist.reduce(grad, dst=owner, async_op=True)
        if owner == world.rank:
            pending.append((grad, work))
        else:
            work.wait()
            parameter.grad = None

    def wait() -> None:
        for _, work in pending:
            work.wait()
        pending.clear()

    for parameter in owners:
        parameter.register_post_accumulate_grad_hook(reduce)
    return wait


class BucketedReplica(nn.Module):
    """Replacement for `DistributedDataParallel`, whose reducer refuses fake tensors; allocates the same memory.

    Flat buckets exist beside the gradients and are cut as torch cuts them: parameters in reverse order in the first
    step, then in the order in which their gradients arrive; the first bucket has 1 MiB, the others 25 MiB each.
    """

    def __init__(self, module: nn.Module, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__()
        self.module = module
        self._limits = [FIRST_BUCKET_BYTES, bucket_bytes]
        self._arrived: list[Tensor] = []
        self._rebuilt = False
        self._synchronizes = True
        parameters: list[Tensor] = list(trained(module).values())
        cut = self._cut(parameters, [])
        self._buckets = [self._bucket([parameters[index] for index in bucket]) for bucket in reversed(cut)]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def _arrive(self, parameter: Tensor) -> None:
        if self._synchronizes:
            self._arrived.append(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally within a `with` block, as `DistributedDataParallel.no_sync` does."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def forward(self, *inputs: Tensor) -> Any:
        """Run the module's forward; in the second step, rebuild the buckets before it."""
        if self._synchronizes and self._arrived and not self._rebuilt:
            order, self._rebuilt = self._arrived, True
            cut = self._cut(order, list(range(len(order))))
            self._buckets = [self._bucket([order[index] for index in bucket]) for bucket in cut]
        if self._synchronizes:
            self._arrived.clear()
        return self.module(*inputs)

    def _cut(self, parameters: list[Tensor], order: list[int]) -> list[list[int]]:
        """Return the parameters of each bucket, by index, by torch's own rule."""
        compute: Any = vars(dist)["_compute_bucket_assignment_by_size"]
        buckets: list[list[int]] = compute(parameters, self._limits, [False] * len(parameters), order)[0]
        return buckets

    def _bucket(self, parameters: list[Tensor]) -> Tensor:
        with of_kind("communication buckets"), torch.no_grad():
            return torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)


# `fsdp`: torch's `fully_shard` on every block and on the rest, which frees each block's weights after its forward.


@dataclass(frozen=True)
class FullyShard:
    """Strategy `fsdp`: float32 weights, gradients and optimizer state, each sharded along the first dimension.

    Bytes per parameter with Adam on R ranks: 16/R, and a block's whole weights while it runs. With ``amp``, blocks are
    gathered and gradients reduced in the lower data type (`MixedPrecisionPolicy`). Parameters outside all blocks are
    whole from the start of the forward to the end of the backward.
    """

    amp: bool = False

    group = 1
    warm_steps = 1

    @property
    def name(self) -> str:
        return "amp+fsdp" if self.amp else "fsdp"

    def prepare(self, work: Workload, world: World) -> PlainStep:
        """Return the step on this rank's share of the batch."""
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
