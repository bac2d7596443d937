"""Schedules of a pipeline: the stages of each rank, the order of computation, and the idle time.

"" is 1F1B, with one stage per rank. The others have two stages per rank, numbered along the blocks:

    interleaved    rank r has stages r and r + R: torch's `ScheduleInterleaved1F1B`
    zb             stages as in interleaved; the backward is split: gradients of inputs, which other ranks wait for,
                   and gradients of weights, which fill gaps (`ScheduleInterleavedZeroBubble`)
    zbv            rank r has stages r and 2 R - 1 - r, rank 0 the first and the last: `ScheduleZBVZeroBubble`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from magis.errors import UsageError

Schedule = Schedule1F1B | PipelineScheduleMulti
_MADE = {"interleaved": ScheduleInterleaved1F1B, "zb": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble}

FORWARD, BACKWARD, OF_INPUTS, OF_WEIGHTS = "F", "B", "I", "W"
"""Kinds of computation of a micro-batch in a stage, in torch's letters; the backward is whole or split in two."""

Work = tuple[int, str, int]
"""Unit of computation: stage, kind of computation, index of the micro-batch."""

COMPUTED: ContextVar[tuple[int, str] | None] = ContextVar("COMPUTED", default=None)
"""Stage and kind of computation that run now, set only with fake process groups."""


def held_stages(schedule: str, ranks: int, rank: int) -> tuple[int, ...]:
    """Return the stage numbers of a rank."""
    if not schedule:
        return (rank,)
    return (rank, 2 * ranks - 1 - rank if schedule == "zbv" else rank + ranks)


def check_micro_batches(what: str, schedule: str, ranks: int, count: int) -> None:
    """Raise UsageError for a number of micro-batches that a schedule does not accept."""
    rounds = max(1, count // ranks)
    if schedule in ("interleaved", "zb") and count % rounds:
        raise UsageError(
            f"{what} goes around its {ranks} ranks {rounds} times, with as many micro-batches each time, and "
            f"{count} are no multiple of that",
            hint=f"use a multiple of {ranks} micro-batches, or leave {schedule!r} out",
        )


def scheduled(schedule: str, stages: Sequence[PipelineStage], count: int) -> Schedule:
    """Return torch's schedule of ``count`` micro-batches over a rank's stages.

    Gradients are sums over the micro-batches; the last stage returns its loss.
    """
    if not schedule:
        return Schedule1F1B(stages[0], count, loss_fn=_own_loss, scale_grads=False)
    return _MADE[schedule]([*stages], count, loss_fn=_own_loss, scale_grads=False)


def _own_loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.sum()


@contextmanager
def _computing(stage: int, what: str) -> Iterator[None]:
    token = COMPUTED.set((stage, what))
    try:
        yield
    finally:
        COMPUTED.reset(token)


class SettledStage(PipelineStage):
    """Pipeline stage with preset shapes, for fake process groups, whose ranks cannot exchange them.

    It keeps sent tensors alive as long as the handle of a real send would: with one stage per rank the last activation,
    with two (``sent`` is given) all sent tensors until the end of the schedule.
    """

    sent: list[Tensor] | None = None
    _last: Sequence[Tensor] = ()

    @property
    def _warm(self) -> int:
        return min(self.chunks or 1, self.num_stages - self.stage_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the parent's sends of a forward, and keep their tensors alive."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if self.sent is not None:
            self.sent += (op.tensor for op in ops)
        elif fwd_chunk_id < self._warm - 1:  # the last one of the warm-up goes out with a receive, and is waited for
            self._last = [op.tensor for op in ops]
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the parent's sends of a backward, and keep their tensors alive."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if self.sent is not None:
            self.sent += (op.tensor for op in ops)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the parent's receives, and free the last activation once its send has finished."""
        if bwd_chunk_id == (self.chunks or 0) - self._warm + 1:
            self._last = ()
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch, recorded in COMPUTED."""
        with _computing(self.stage_index, FORWARD):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a micro-batch, recorded in COMPUTED."""
        with _computing(self.stage_index, BACKWARD if full_backward else OF_INPUTS):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the backward of weights of a micro-batch, recorded in COMPUTED."""
        with _computing(self.stage_index, OF_WEIGHTS):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _warmup_forward_vote(self, *_args: Any, **_kwargs: Any) -> Any:
        return SimpleNamespace(item=lambda: 1)  # as of a tensor: all stages know their metadata

    _warmup_backward_result = _warmup_forward_vote


@dataclass(frozen=True)
class Waiting:
    """Idle time of a pipeline's rank in a step, assuming that all ranks compute equally long."""

    schedule: str
    ranks: int
    rank: int
    count: int
    """Number of micro-batches."""
    orders: Mapping[int, Sequence[Work]] = field(default_factory=dict)
    """Order of computation of each rank; empty for 1F1B, whose idle time has a formula."""

    @property
    def sends_ahead(self) -> bool:
        """True if a rank continues while its sends are in flight."""
        return bool(self.schedule)

    def idle_ns(self, compute_ns: float, took: Mapping[tuple[int, str], float], message_ns: float) -> float:
        """Return the idle time of a rank in nanoseconds.

        ``compute_ns`` is its computing time in a step, ``took`` its parts by (stage, kind), ``message_ns`` the time of
        a send.
        """
        if not self.orders:
            return compute_ns * (self.ranks - 1) / self.count
        each = self._micro_batch_ns(took)
        busy = sum(each[what, self._part(stage)] for stage, what, _ in self.orders[self.rank])
        return self._end_ns(each, message_ns) - busy

    def _part(self, stage: int) -> int:
        """Return 0 for a stage that is its rank's first, 1 for its second."""
        return int(stage >= self.ranks)

    def _micro_batch_ns(self, took: Mapping[tuple[int, str], float]) -> dict[tuple[str, int], float]:
        """Return a micro-batch's time by (kind, first or second stage of a rank), from this rank's times.

        Stage 0 computes no gradient of inputs, so the split of the backward is taken from other stages.
        """
        own = held_stages(self.schedule, self.ranks, self.rank)
        inputs, weights = (
            sum(took.get((stage, what), 0.0) for stage in own if stage) for what in (OF_INPUTS, OF_WEIGHTS)
        )
        share = inputs / (inputs + weights) if inputs + weights else 0.0
        found: dict[tuple[str, int], float] = {}
        for stage in own:
            forward, whole, first, second = (
                took.get((stage, what), 0.0) / self.count for what in (FORWARD, BACKWARD, OF_INPUTS, OF_WEIGHTS)
            )
            part, both = self._part(stage), first + second
            found |= {(FORWARD, part): forward, (BACKWARD, part): whole}
            found |= {(OF_INPUTS, part): share * both, (OF_WEIGHTS, part): (1 - share) * both}
        return found

    def _end_ns(self, each: Mapping[tuple[str, int], float], message_ns: float) -> float:
        """Return the time in nanoseconds at which the last rank ends, if all work starts as early as possible."""
        place = {stage: rank for rank, order in self.orders.items() for stage, _, _ in order}
        ended: dict[Work, float] = {}
        at: Counter[int] = Counter()
        clock = dict.fromkeys(self.orders, 0.0)
        going = True
        while going:
            going = False
            for rank, order in self.orders.items():
                while at[rank] < len(order):
                    work = order[at[rank]]
                    needed = self._needed(work)
                    if needed is not None and needed not in ended:
                        break
                    if needed is not None:
                        sent = message_ns if place[needed[0]] != rank else 0.0
                        clock[rank] = max(clock[rank], ended[needed] + sent)
                    clock[rank] += each[work[1], self._part(work[0])]
                    ended[work] = clock[rank]
                    at[rank] += 1
                    going = True
        return max(clock.values())

    def _needed(self, work: Work) -> Work | None:
        """Return the work of a neighbouring stage that must finish first; None if there is none."""
        stage, what, number = work
        if what == FORWARD:
            return (stage - 1, what, number) if stage else None
        if what == OF_WEIGHTS or stage == 2 * self.ranks - 1:
            return None
        return (stage + 1, what, number)


def waiting(schedule: str, made: Schedule, ranks: int, rank: int, count: int) -> Waiting:
    """Return the idle time of a rank under one of torch's schedules."""
    if isinstance(made, Schedule1F1B):
        return Waiting(schedule, ranks, rank, count)
    orders = {
        place: tuple(
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in order
            if action is not None and action.microbatch_index is not None
        )
        for place, order in made.pipeline_order.items()
    }
    return Waiting(schedule, ranks, rank, count, orders)
