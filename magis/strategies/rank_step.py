"""Protocols of distributed strategies: a strategy makes the training step of a workload on one rank of a world.

Every strategy takes one *global* batch, the workload's: a data-parallel rank works on its shard of the batch, the ranks
of a tensor- or pipeline-parallel group work on one shard together. So all strategies run the same training step, and
samples per second are comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from magis.capture import Workload
from magis.errors import UsageError

WARM_STEPS = 2
"""Number of warm-up steps, unless a strategy has its own. Optimizers make their state in the first step,
DistributedDataParallel its final buckets in the second."""


@dataclass(frozen=True)
class World:
    """World size, and one rank in it.

    For a size above 1, the caller has initialized torch.distributed's default process group: with real ranks, or, if
    ``fake``, with the "fake" backend and fake tensors.
    """

    size: int = 1
    rank: int = 0
    device: str = "cpu"
    """Device type of torch: "cpu" or "cuda"."""
    fake: bool = False


class RankStep(Protocol):
    """One rank's part of a training step, with its module and optimizer."""

    module: nn.Module
    """This rank's part of the network."""

    def prepare(self) -> None:
        """Prepare a step outside of the measured window: set gradients to None."""

    def run(self) -> Tensor | None:
        """Run one step, collectives included; return the mean loss of the rank's shard of the batch. Returns None on
        ranks without a loss (all pipeline stages but the last)."""


class RankStrategy(Protocol):
    """A way to run a training step on several ranks. Optional attributes: ``warm_steps``, the number of warm-up steps
    (default `WARM_STEPS`), and ``stages`` of a pipeline."""

    @property
    def name(self) -> str:
        """Return the name of the strategy: "ddp", "amp+zero1", "tp2"."""

    @property
    def group(self) -> int:
        """Return the number of ranks that share one shard of the batch; the world size is a multiple of that number."""

    def prepare(self, work: Workload, world: World) -> RankStep:
        """Return the step of ``work`` (whole module, global batch) on this rank.

        May modify the module. Raises UsageError, in one line with the numbers, for an unsupported world or network.
        """


class Wrapping:
    """A wrapper of another strategy, with the inner strategy's name, group and stages."""

    strategy: RankStrategy

    @property
    def name(self) -> str:
        return self.strategy.name

    @property
    def group(self) -> int:
        return self.strategy.group

    @property
    def warm_steps(self) -> int:
        return int(getattr(self.strategy, "warm_steps", WARM_STEPS))

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages; 1 without a pipeline."""
        return int(getattr(self.strategy, "stages", 1))


def batch_size(work: Workload) -> int:
    """Return the global batch size, dimension 0 of the first input. Raises UsageError without a batch dimension."""
    if not work.inputs or not work.inputs[0].dim():
        raise UsageError(f"{work.name}: the first input has no dimension along which a batch could be shared out")
    return int(work.inputs[0].shape[0])


def samples_of(work: Workload) -> int:
    """Return the batch size; 0 without a batch dimension."""
    try:
        return batch_size(work)
    except UsageError:
        return 0


def share_of_batch(work: Workload, index: int, count: int) -> Workload:
    """Return the workload with the ``index``-th of ``count`` equal shards of its batch, along dimension 0. Tensors of
    another length are kept whole. Raises UsageError if ``count`` does not divide the batch."""
    samples = batch_size(work)
    if samples % count:
        raise UsageError(
            f"{work.name}: a batch of {samples} samples cannot be shared out evenly to {count}",
            hint="use a number of ranks that divides it",
        )
    length = samples // count

    def part(tensor: Tensor) -> Tensor:
        whole = tensor.dim() and tensor.shape[0] == samples
        return tensor.narrow(0, index * length, length).clone() if whole else tensor

    return replace(work, inputs=tuple(map(part, work.inputs)), targets=tuple(map(part, work.targets)))


def split(tensors: Sequence[Tensor], samples: int, count: int) -> list[tuple[Tensor, ...]]:
    """Return the micro-batches of these tensors, as views; tensors that are no batch are in each."""
    parts = [t.tensor_split(count) if t.dim() and t.shape[0] == samples else (t,) * count for t in tensors]
    return list(zip(*parts, strict=True)) if parts else [()] * count


def loss_of_shares(work: Workload, count: int) -> Callable[[], Tensor]:
    """Return a function that computes the mean loss of ``count`` shards of the batch, as that many ranks do. With batch
    norm it differs from the loss of the whole batch."""
    shares = [share_of_batch(work, index, count) for index in range(count)]

    def mean() -> Tensor:
        losses = [share.loss_fn(work.module(*share.inputs), *share.targets) for share in shares]
        return torch.stack(losses).mean()

    return mean


# Preparation of workloads for ONNX Runtime and for ranks.

_DROPOUT = ("p", "dropout", "dropout_p", "attention_dropout")
"""Attributes of modules that are dropout probabilities."""


def check_update(work: Workload, strategy: str) -> None:
    """Raise UsageError for an optimizer that the strategy (ranks, ONNX Runtime) cannot run."""
    own = work.optimizer.own
    if own is not None:
        what = f"{strategy} updates by SGD, Adam or AdamW; the optimizer of {work.name} is {own.name}"
        raise UsageError(what, hint="choose one of these, or leave the strategy out")


def has_dropout(module: nn.Module) -> bool:
    """Return True if a sub-module has a dropout probability above 0: results then depend on the generator."""
    return any(
        isinstance(value := vars(part).get(name), float) and value > 0 for part in module.modules() for name in _DROPOUT
    )


def without_dropout(module: nn.Module) -> nn.Module:
    """Set every dropout probability in the module to 0, attention's as well, so that ranks compute what one device
    does."""
    for part in module.modules():
        for name in _DROPOUT:
            if isinstance(vars(part).get(name), float):
                setattr(part, name, 0.0)
    return module
