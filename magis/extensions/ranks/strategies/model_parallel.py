"""Tensor and pipeline parallelism, alone and together, with replicas of the group on the remaining ranks.

Ranks are numbered with tensor-parallel ranks adjacent, then stages, then replicas. Gradients are averaged over the
replicas after the backward, in buckets.

Stages are cut between blocks and run by a schedule of torch (`schedules.py`), on twice as many micro-batches as ranks
if the share of the batch allows it. The loss is part of the last stage: its output is one number per micro-batch, so no
logits are kept. Embeddings tied to the output projection are on both the first and the last stage, which sum up their
gradients (Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from magis.capture import Workload
from magis.errors import UsageError
from magis.extensions.ranks.strategies.distributed import (
    LossScaler,
    PlainStep,
    average_gradients,
    cast,
    gradients,
    held_by,
    local,
    make_optimizer,
    mesh,
    place,
    quiet,
    trained,
)
from magis.extensions.ranks.strategies.schedules import (
    Schedule,
    SettledStage,
    Waiting,
    check_micro_batches,
    held_stages,
    scheduled,
    waiting,
)
from magis.extensions.ranks.strategies.stage_cuts import StageCut, cut_of, keep_stages, run_stage, stage_blocks
from magis.extensions.ranks.strategies.stage_flow import check_flow
from magis.extensions.ranks.strategies.tensor_cuts import share_network
from magis.strategies.rank_step import World, batch_size, share_of_batch, split


@dataclass(frozen=True)
class ModelParallel:
    """Strategy `tpN`, `tpN+sp`, `ppN`, `ppN+zb`, `tpN+ppM`: groups of ``tensor`` x ``stages`` ranks.

    Bytes per parameter with Adam: 16, for the parameters that this rank holds; weights are float32, ``amp`` is
    autocast.
    """

    tensor: int = 1
    stages: int = 1
    """Number of ranks of a pipeline; each has one stage, or two under some schedules."""
    amp: bool = False
    micro_batches: int | None = None
    """Number of micro-batches; None: the largest divisor of the batch's share up to twice the ranks of the pipeline."""
    vocabulary: bool = True
    """True if tensor parallelism also cuts the vocabulary; else every rank has all of it."""
    sequence: bool = False
    """True if tensor parallelism also cuts the sequence between layers; not together with stages."""
    schedule: str = ""
    """Name of the pipeline's schedule in `schedules.py`; "": 1F1B."""

    warm_steps = 1
    hollow = True
    """True if a rank is predicted on hollow tensors, since networks of libraries branch differently on fake ones."""

    @property
    def name(self) -> str:
        sizes = [("tp", self.tensor), ("pp", self.stages)]
        further = [*(["sp"] if self.sequence else []), *([self.schedule] if self.schedule else [])]
        plain = "+".join([*(f"{kind}{size}" for kind, size in sizes if size > 1), *further])
        return f"amp+{plain}" if self.amp else plain

    @property
    def group(self) -> int:
        return self.tensor * self.stages

    def prepare(self, work: Workload, world: World) -> PlainStep | PipelineStep:
        """Return the step on this rank: its stage, and its part of each block in the stage."""
        count = world.size // self.group
        ranks = mesh(world, {"dp": count, "pp": self.stages, "tp": self.tensor})
        replica, stage, _ = (ranks.get_local_rank(kind) for kind in ("dp", "pp", "tp"))
        work = share_of_batch(work, replica, count)
        replicas = ranks.get_group("dp")
        if self.stages > 1:
            return self._pipeline(work, world, ranks, stage, replicas)
        work = share_network(work, ranks["tp"], vocabulary=self.vocabulary, sequence=self.sequence)
        params = trained(work.module)
        optimizer = make_optimizer(work, params, self.name)

        def average() -> None:
            average_gradients(params.values(), replicas)

        return PlainStep(work.module, work, optimizer, world, self.amp, work.module, after_backward=average)

    def _pipeline(
        self, work: Workload, world: World, ranks: DeviceMesh, index: int, replicas: dist.ProcessGroup
    ) -> PipelineStep:
        held = held_stages(self.schedule, self.stages, index)
        stages = self.stages * len(held)
        cut = cut_of(work, stages, self.stages)
        if not work.targets:
            raise UsageError(f"{work.name}: {self.name} needs targets, of which its last stage computes the loss")
        count = micro_batches(self, work)
        inputs, targets = (split(tensors, batch_size(work), count) for tensors in (work.inputs, work.targets))
        hidden = hidden_state(work, cut, count, cast(world, amp=self.amp))
        keep_stages(work, cut, stages, held)
        if self.tensor > 1:
            work = share_network(work, ranks["tp"], vocabulary=self.vocabulary)
        ends = (0 in held, stages - 1 in held)
        # each end of the pipeline keeps what it reads of the batch
        read = work.inputs if ends[0] or not cut.in_methods else ()
        work = replace(work, inputs=read, targets=work.targets if ends[1] else ())
        params = trained(work.module)
        parts: list[_Part] = []
        made: list[PipelineStage] = []
        sent: list[Tensor] = []
        for number in held:
            first, last = number == 0, number == stages - 1
            blocks = stage_blocks(len(cut.blocks), stages, number)
            parts.append(_Part(work, cut, blocks, (first, last), cast(world, amp=self.amp), inputs, targets))
            stage = (SettledStage if world.fake else PipelineStage)(
                parts[-1],
                number,
                stages,
                torch.device(place(world)),
                input_args=_first(work.inputs, count) if first else _like(hidden),
                output_args=torch.empty(1, device=place(world), requires_grad=True) if last else _like(hidden),
                group=ranks.get_group("pp"),
            )
            if isinstance(stage, SettledStage) and self.schedule:
                stage.sent = sent
            made.append(stage)
        schedule = scheduled(self.schedule, made, count)
        # where one rank has both ends, a tied weight is one
        tied = tied_group(ranks, self.stages) if cut.tied and self.schedule != "zbv" else None
        step = PipelineStep(
            module=work.module,
            work=work,
            optimizer=make_optimizer(work, params, self.name),
            parts=tuple(parts),
            schedule=schedule,
            count=count,
            scaler=LossScaler(world, enabled=self.amp and world.device == "cuda"),
            replicas=replicas,
            tied=None if tied is None else next(((params[name], tied) for name in cut.tied if name in params), None),
            waiting=waiting(self.schedule, schedule, self.stages, index, count),
            sent=sent,
        )
        step.scale(step.scaler)
        return step


class _Part(nn.Module):
    """Module of one stage: its blocks, the layers before in the first stage, those after and the loss in the last."""

    def __init__(
        self,
        work: Workload,
        cut: StageCut,
        blocks: range,
        ends: tuple[bool, bool],
        casting: AbstractContextManager[Any],
        inputs: Sequence[tuple[Tensor, ...]],
        targets: Sequence[tuple[Tensor, ...]],
    ) -> None:
        super().__init__()
        self.net = work.module
        self.scaler: LossScaler | None = None
        self._cut, self._blocks, self.ends, self._casting = cut, blocks, ends, casting
        self._loss_fn: Callable[..., Tensor] = work.loss_fn
        # inputs and targets that the stage reads directly instead of from the schedule, by micro-batch
        self._inputs = [()] * len(inputs) if cut.in_methods or ends[0] else inputs
        self._targets = targets if ends[1] else [()] * len(inputs)
        self._next: Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = iter(())
        self.losses: list[Tensor] = []

    def begin(self) -> None:
        """Reset the micro-batches and losses for a new step."""
        self._next = zip(self._inputs, self._targets, strict=True)
        self.losses = []

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the next micro-batch, on inputs in the first stage, else on the hidden state; return the next hidden
        state, or the loss in the last stage."""
        first, last = self.ends
        read, targets = next(self._next)
        given = (inputs, None) if first else (read, inputs[0])
        with self._casting:
            del inputs
            out = run_stage(self.net, self._cut, self._blocks, *given, last=last)
            if not last:
                found: Tensor = out
                return found
            loss = self._loss_fn(out, *targets)
        self.losses.append(loss.detach())
        scaled = loss if self.scaler is None else self.scaler.scaled(loss)
        return scaled.reshape(1)


@dataclass
class PipelineStep:
    """Step of one rank's pipeline stages."""

    module: nn.Module
    work: Workload
    """Workload with the part of the batch that this rank's stages read."""
    optimizer: Optimizer
    parts: tuple[_Part, ...]
    schedule: Schedule
    count: int
    """Number of micro-batches."""
    scaler: LossScaler
    replicas: dist.ProcessGroup
    tied: tuple[nn.Parameter, dist.ProcessGroup] | None
    """Tied parameter that the first and the last stage hold, and their process group; None without one."""
    waiting: Waiting
    sent: list[Tensor]
    """Tensors in flight until the end of the schedule, only with fake process groups."""

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage."""
        return any(part.ends[0] for part in self.parts)

    def scale(self, scaler: LossScaler) -> None:
        """Replace the loss scaler."""
        self.scaler = scaler
        for part in self.parts:
            part.scaler = scaler

    def prepare(self) -> None:
        """Set gradients to None."""
        self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> Tensor | None:
        """Run one whole step, and return the mean loss of the share; None on ranks without the last stage."""
        for part in self.parts:
            part.begin()
        # the loss is in the last stage, the schedule insists on something to compare its output with
        target = self.work.targets[0].new_zeros(self.count) if self.work.targets else None
        losses: list[Tensor] | None = [] if self.work.targets else None
        with quiet():
            self.schedule.step(
                *(self.work.inputs if self.is_first else ()), target=target, losses=losses, return_outputs=False
            )
        self.sent.clear()
        for parameter in trained(self.module).values():
            if parameter.grad is not None:
                parameter.grad.div_(self.count)
        if self.tied is not None:
            sum_gradient(*self.tied)
        average_gradients(trained(self.module).values(), self.replicas)
        self.scaler.step(self.optimizer, gradients(self.optimizer))
        found = [loss for part in self.parts for loss in part.losses]
        return torch.stack(found).mean() if found else None

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) for all tensors that this rank keeps alive between operators."""
        yield from held_by(self.module, self.optimizer, self.work)


def sum_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """All-reduce the gradient of a parameter (sum) over the ranks that hold the parameter."""
    if parameter.grad is None:
        return
    grad = local(parameter.grad)
    whole = grad.contiguous()  # a gradient from the backward of weights may be a transposed view, which gloo refuses
    dist.all_reduce(whole, group=group)
    if whole is not grad:
        grad.copy_(whole)


def micro_batches(strategy: ModelParallel, work: Workload) -> int:
    """Return the number of micro-batches. Raises UsageError if the share of the batch has fewer samples than stages."""
    samples, stages = batch_size(work), strategy.stages
    wrong = [tuple(t.shape) for t in work.inputs if not t.dim() or t.shape[0] != samples]
    if wrong:
        raise UsageError(
            f"{work.name}: {strategy.name} cuts a batch of {samples} samples into micro-batches, and an input has "
            f"shape {wrong[0]}"
        )
    if strategy.micro_batches is not None:
        count = strategy.micro_batches
    else:
        count = max(n for n in range(1, min(samples, 2 * stages) + 1) if samples % n == 0)
    if count < stages or samples % count:
        wanted = f"at least {stages}" if strategy.micro_batches is None else f"{max(count, stages)}"
        raise UsageError(
            f"{work.name}: {strategy.name} needs {wanted} equal micro-batches, and a group's share of the "
            f"batch has {samples} samples",
            hint=f"use a batch of which that is a multiple of {max(count, stages)}, or fewer ranks",
        )
    check_micro_batches(f"{work.name}: {strategy.name}", strategy.schedule, stages, count)
    return count


def _first(tensors: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    return tuple(t.tensor_split(count)[0] for t in tensors)


def hidden_state(work: Workload, cut: StageCut, count: int, casting: AbstractContextManager[Any]) -> Tensor:
    """Compute the hidden state of a micro-batch, for its size and type; raises UsageError for a forward that cannot be
    run in stages."""
    inputs = _first(work.inputs, count)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), casting:
        if not cut.in_methods:
            check_flow(work, cut, inputs)
        found: Tensor = run_stage(work.module, cut, range(1), inputs, last=False)
        return found


def _like(hidden: Tensor) -> Tensor:
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device, requires_grad=True)


def tied_group(ranks: DeviceMesh, stages: int) -> dist.ProcessGroup | None:
    """Return the process group of this rank's first and last stage; all ranks must call it, as each creates all
    groups."""
    if stages == 2:
        return ranks.get_group("pp")
    own: dist.ProcessGroup | None = None
    with _disable_current_modes(), quiet():
        ends: list[list[int]] = ranks.mesh[:, [0, -1], :].transpose(1, 2).flatten(0, 1).tolist()
        for members in ends:
            group = dist.new_group(members)
            if dist.get_rank() in members:
                own = group
    return own
