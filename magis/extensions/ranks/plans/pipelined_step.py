"""The whole step of a pipeline stage as one function of its parameters: torch's `Schedule1F1B` as operators.

    warm-up    forwards of the first micro-batches, one fewer than there are stages from this one on
    then       one forward, one backward, in turn: hidden states go to the next stage, gradients back
    at last    the remaining backwards; gradients are averaged over micro-batches and replicas

Sends and receives are operators of the step (`magis/ops/exchanges.py`), whose order a plan must keep. The plan may
choose which tensors it saves from a forward to its backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from magis.capture import Workload
from magis.extensions.ranks.plans.sharded_weights import Replica
from magis.extensions.ranks.strategies.distributed import BUCKET_BYTES, buckets, rule_of, trained
from magis.extensions.ranks.strategies.stage_cuts import StageCut, run_stage
from magis.ops.collectives import all_reduce
from magis.ops.exchanges import NOTHING, exchange
from magis.strategies.rank_step import split


@dataclass(frozen=True)
class HiddenState:
    """Size, data type and device of the hidden state that stages send for one micro-batch."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Stage:
    """Stage of a pipeline, and its process groups."""

    cut: StageCut
    blocks: range
    index: int
    stages: int
    micro_batches: int
    samples: int
    """Number of samples in the pipeline's share of the batch."""
    hidden: HiddenState
    group: str
    """Name of the pipeline's process group."""
    replicas: Replica
    """Averaging of gradients over the replicas of the pipeline."""
    ends: str = ""
    """Name of the process group of the first and the last stage; "" if they share no tied weight."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


def pipelined(work: Workload, stage: Stage) -> Workload:
    """Return the workload with this stage's step.

    Its module, with the parameters of the stage alone, takes the inputs and targets that the stage reads, and returns
    the mean loss; on all stages but the last, the loss is 0.
    """
    inputs = work.inputs if stage.is_first or not stage.cut.in_methods else ()
    targets = work.targets if stage.is_last else ()
    work.module.forward = Forward(work.module, stage, work.loss_fn, len(inputs))
    rule = rule_of(work, trained(work.module))
    return replace(work, inputs=(*inputs, *targets), targets=(), loss_fn=_itself, optimizer=rule)


def _itself(loss: Tensor) -> Tensor:
    return loss


@dataclass
class Forward:
    """Forward of a stage's module: runs the whole schedule, and passes its gradients to autograd for the backward."""

    net: nn.Module
    stage: Stage
    loss_fn: Callable[..., Tensor]
    inputs: int
    """Number of arguments that are inputs of the network; the others are targets."""

    def __call__(self, *given: Tensor) -> Tensor:
        params = {name: each for name, each in self.net.named_parameters() if each.requires_grad}
        run = OneForwardOneBackward(self.net, self.stage, self.loss_fn, tuple(params), tuple(params.values()))
        loss: Tensor = _PrecomputedGradients.apply(run, given[: self.inputs], given[self.inputs :], *params.values())  # type: ignore[no-untyped-call]
        return loss


class _PrecomputedGradients(torch.autograd.Function):
    """Autograd function that returns the loss of a step, with gradients already computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, run: OneForwardOneBackward, inputs: Sequence[Tensor], targets: Sequence[Tensor], *_params: Tensor
    ) -> Tensor:
        loss, ctx.grads = run.step(inputs, targets)
        return loss

    @staticmethod
    def backward(ctx: Any, *_grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, ()
        return None, None, None, *grads


@dataclass
class OneForwardOneBackward:
    """One step of a stage under the schedule one-forward-one-backward (1F1B)."""

    net: nn.Module
    stage: Stage
    loss_fn: Callable[..., Tensor]
    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    begun: deque[tuple[Tensor | None, Tensor]] = field(default_factory=deque)
    """Input and output of each micro-batch that still needs its backward."""
    losses: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    """Accumulated gradients by parameter; None before the first one."""

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Run the schedule, and return the mean loss and the gradients of all parameters."""
        stage, count = self.stage, self.stage.micro_batches
        before, behind = stage.index - 1, stage.index + 1
        warm = min(count, stage.stages - stage.index)
        self.grads = [None] * len(self.params)
        shares = [split(tensors, stage.samples, count) for tensors in (inputs, targets)]
        sends: list[Tensor] = []  # to the next stage, then to the one before
        for number in range(warm):
            given = None if stage.is_first else self._exchange([], before)
            sends = self._forward(number, given, *shares)
            if number < warm - 1:
                self._exchange(sends, behind, receives=False)
        for number in range(count):
            grad = None if stage.is_last else self._exchange(sends, behind)
            sends = self._backward(grad)
            if number + warm < count:
                given = None if stage.is_first else self._exchange(sends, before)
                sends = self._forward(number + warm, given, *shares)
            else:
                if not stage.is_first:
                    self._exchange(sends, before, receives=False)
                sends = []
        loss = torch.stack(self.losses).mean() if self.losses else torch.zeros((), device=stage.hidden.device)
        return loss, self._mean_gradients()

    def _exchange(self, sent: Sequence[Tensor], peer: int, *, receives: bool = True) -> Tensor:
        hidden = self.stage.hidden
        size = hidden.size if receives else NOTHING
        ready = [tensor.detach().contiguous() for tensor in sent]
        found: Tensor = exchange(ready, size, hidden.dtype, hidden.device, peer, self.stage.group)
        return found

    def _forward(
        self, number: int, given: Tensor | None, inputs: Sequence[tuple[Tensor, ...]], targets: Sequence[Any]
    ) -> list[Tensor]:
        """Run the forward of a micro-batch, and return the tensors to send to the next stage; none from the last."""
        stage = self.stage
        with torch.enable_grad():
            start = None if given is None else given.requires_grad_()
            out = run_stage(self.net, stage.cut, stage.blocks, inputs[number], start, last=stage.is_last)
            if stage.is_last:
                out = self.loss_fn(out, *targets[number])
                self.losses.append(out.detach())
        self.begun.append((start, out))
        return [] if stage.is_last else [out]

    def _backward(self, grad: Tensor | None) -> list[Tensor]:
        """Run the backward of a micro-batch, accumulate gradients, and return the tensors for the previous stage."""
        start, out = self.begun.popleft()
        wanted = self.params if start is None else (start, *self.params)
        found: list[Tensor | None] = [*torch.autograd.grad(out, wanted, grad, allow_unused=True)]
        back = None if start is None else found.pop(0)
        self.grads = [
            mine if other is None else other if mine is None else mine + other
            for mine, other in zip(self.grads, found, strict=True)
        ]
        return [] if back is None else [back]

    def _mean_gradients(self) -> tuple[Tensor | None, ...]:
        stage = self.stage
        grads = {
            name: grad / stage.micro_batches
            for name, grad in zip(self.names, self.grads, strict=True)
            if grad is not None
        }
        tied = next((name for name in stage.cut.tied if name in grads), None)
        if stage.ends and tied is not None:
            grads[tied] = all_reduce(grads[tied], "sum", stage.ends)
        if stage.replicas.ranks > 1:
            for names in buckets({name: grads[name] for name in reversed(grads)}, BUCKET_BYTES):
                means = stage.replicas.returned([grads[name] for name in names])
                grads |= {name: mean for name, mean in zip(names, means, strict=True) if mean is not None}
        return tuple(grads.get(name) for name in self.names)
