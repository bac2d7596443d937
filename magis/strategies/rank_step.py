"""Strategies: each makes the training step of a workload on one rank of a world.

Every strategy takes the same *global* batch, which is the workload's: a data-parallel rank works on its share of it,
the ranks of a tensor- or pipeline-parallel group work on the same share together. So one step of every strategy is the
same step of training, and samples a second compare.
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
"""Steps before the measured one, unless a strategy says otherwise. Optimizers make their state in the first step,
DistributedDataParallel its final buckets in the second."""


@dataclass(frozen=True)
class World:
    """Number of ranks of a run, and one rank among them.

    Whoever makes a world of more than one has set up torch.distributed's default process group: of real ranks, or where
    nothing is run (``fake``: tensors are fake, too) the "fake" one.
    """

    size: int = 1
    rank: int = 0
    device: str = "cpu"
    """Torch's device type: "cpu" or "cuda"."""
    fake: bool = False


class RankStep(Protocol):
    """One rank's part of a training step; owns its module and optimizer."""

    module: nn.Module
    """Part of the network that this rank holds."""

    def prepare(self) -> None:
        """Do what happens before the measured window: set gradients to None."""

    def run(self) -> Tensor | None:
        """Run one whole step, communication included; return the mean loss of the rank's share of the batch. None on
        a rank that sees no loss (all pipeline stages but the last)."""


class RankStrategy(Protocol):
    """A way to run a training step on a number of ranks. It may have ``warm_steps``, how many steps run before the
    one that is measured, else `WARM_STEPS`; and ``stages``, of a pipeline."""

    @property
    def name(self) -> str:
        """Name as it is asked for: "ddp", "amp+zero1", "tp2"."""

    @property
    def group(self) -> int:
        """Ranks that work on one share of the batch together; the world's size is a multiple of it."""

    def prepare(self, work: Workload, world: World) -> RankStep:
        """Return the step of ``work`` (whole module, global batch) on this rank.

        The module may be taken over and changed. Raises UsageError, in one line with the numbers, for a world or a
        network that the strategy is not for.
        """


class Wrapping:
    """A strategy around another one, ``strategy``, with that one's name, group and stages."""

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
        """Stages of a pipeline; 1 if there is none."""
        return int(getattr(self.strategy, "stages", 1))


def batch_size(work: Workload) -> int:
    """Return the samples in the (global) batch, the length of the first input. UsageError without one."""
    if not work.inputs or not work.inputs[0].dim():
        raise UsageError(f"{work.name}: the first input has no dimension along which a batch could be shared out")
    return int(work.inputs[0].shape[0])


def samples_of(work: Workload) -> int:
    """Return the samples in the batch; 0 where no batch can be told."""
    try:
        return batch_size(work)
    except UsageError:
        return 0


def share_of_batch(work: Workload, index: int, count: int) -> Workload:
    """Return the workload with the ``index``-th of ``count`` equal shares of its batch, along the first dimension.
    Tensors with another length than the batch's are shared whole. Raises UsageError where the shares are not equal."""
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
    """Return the micro-batches of these tensors, as views; what is no batch goes to each."""
    parts = [t.tensor_split(count) if t.dim() and t.shape[0] == samples else (t,) * count for t in tensors]
    return list(zip(*parts, strict=True)) if parts else [()] * count


def loss_of_shares(work: Workload, count: int) -> Callable[[], Tensor]:
    """Return a function of the loss that ``count`` ranks compute together: the mean of the losses of their shares.
    For a network with batch norm this is another loss than that of the whole batch, which is normalized as one."""
    shares = [share_of_batch(work, index, count) for index in range(count)]

    def mean() -> Tensor:
        losses = [share.loss_fn(work.module(*share.inputs), *share.targets) for share in shares]
        return torch.stack(losses).mean()

    return mean


# Workloads made ready for an engine other than the planned step: ONNX Runtime, ranks.

_DROPOUT = ("p", "dropout", "dropout_p", "attention_dropout")
"""Attributes of modules that hold a probability of dropout."""


def check_update(work: Workload, strategy: str) -> None:
    """Raise UsageError for an optimizer that a strategy of ranks or of ONNX Runtime cannot run."""
    own = work.optimizer.own
    if own is not None:
        what = f"{strategy} updates by SGD, Adam or AdamW; the optimizer of {work.name} is {own.name}"
        raise UsageError(what, hint="choose one of these, or leave the strategy out")


def has_dropout(module: nn.Module) -> bool:
    """Return True if any part draws random numbers: with another generator it would not compute the same."""
    return any(
        isinstance(value := vars(part).get(name), float) and value > 0 for part in module.modules() for name in _DROPOUT
    )


def without_dropout(module: nn.Module) -> nn.Module:
    """Set every probability of dropout to 0, also inside attention: ranks then compute what one does."""
    for part in module.modules():
        for name in _DROPOUT:
            if isinstance(vars(part).get(name), float):
                setattr(part, name, 0.0)
    return module
