"""Schedules of a pipeline: who holds which stages, in which order a rank computes, how long it waits for others.

"" is 1F1B, with one stage on each rank. The others have two, numbered along the blocks:

    interleaved    rank r has stages r and r + R: torch's `ScheduleInterleaved1F1B`
    zb             the same; a backward is one of inputs, which others wait for, and one of weights, which fills gaps
                   (`ScheduleInterleavedZeroBubble`)
    zbv            rank r has stages r and 2 R - 1 - r, the first rank both ends: `ScheduleZBVZeroBubble`
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
"""What a rank computes of a micro-batch in a stage, as torch writes it: the backward as a whole, or in two."""

Work = tuple[int, str, int]
"""A stage, what is computed there, and the number of a micro-batch."""

COMPUTED: ContextVar[tuple[int, str] | None] = ContextVar("COMPUTED", default=None)
"""Among fake ranks: the stage at work, and at what."""


def held_stages(schedule: str, ranks: int, rank: int) -> tuple[int, ...]:
    """The numbers of the stages of a rank."""
    if not schedule:
        return (rank,)
    return (rank, 2 * ranks - 1 - rank if schedule == "zbv" else rank + ranks)


def check_micro_batches(what: str, schedule: str, ranks: int, count: int) -> None:
    """Raise UsageError for a number of micro-batches that a schedule refuses."""
    rounds = max(1, count // ranks)
    if schedule in ("interleaved", "zb") and count % rounds:
        raise UsageError(
            f"{what} goes around its {ranks} ranks {rounds} times, with as many micro-batches each time, and "
            f"{count} are no multiple of that",
            hint=f"use a multiple of {ranks} micro-batches, or leave {schedule!r} out",
        )


def scheduled(schedule: str, stages: Sequence[PipelineStage], count: int) -> Schedule:
    """Torch's schedule of ``count`` micro-batches over a rank's stages. Gradients are sums over them, the last stage
    returns its loss."""
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
    """A stage among fake ranks, which agree without a message: metadata is given, not found out.

    It also holds what is sent for as long as the schedule keeps the handle of a real message, which does: with one
    stage on a rank an activation, with several (``sent`` is given) all that they send, until the end of the schedule.
    """

    sent: list[Tensor] | None = None
    _last: Sequence[Tensor] = ()

    @property
    def _warm(self) -> int:
        return min(self.chunks or 1, self.num_stages - self.stage_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The parent's."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if self.sent is not None:
            self.sent += (op.tensor for op in ops)
        elif fwd_chunk_id < self._warm - 1:  # the last one of the warm-up goes out with a receive, and is waited for
            self._last = [op.tensor for op in ops]
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The parent's."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if self.sent is not None:
            self.sent += (op.tensor for op in ops)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The parent's."""
        if bwd_chunk_id == (self.chunks or 0) - self._warm + 1:
            self._last = ()
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's."""
        with _computing(self.stage_index, FORWARD):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The parent's."""
        with _computing(self.stage_index, BACKWARD if full_backward else OF_INPUTS):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The parent's."""
        with _computing(self.stage_index, OF_WEIGHTS):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _warmup_forward_vote(self, *_args: Any, **_kwargs: Any) -> Any:
        return SimpleNamespace(item=lambda: 1)  # as of a tensor: all stages know their metadata

    _warmup_backward_result = _warmup_forward_vote


@dataclass(frozen=True)
class Waiting:
    """How long a rank of a pipeline stands idle in a step, if the others have as much to compute as it has."""

    schedule: str
    ranks: int
    rank: int
    count: int
    """Micro-batches."""
    orders: Mapping[int, Sequence[Work]] = field(default_factory=dict)
    """What each rank computes, one after the other; empty for 1F1B, of which a formula tells."""

    @property
    def sends_ahead(self) -> bool:
        """Whether a rank goes on while its messages are under way."""
        return bool(self.schedule)

    def idle_ns(self, compute_ns: float, took: Mapping[tuple[int, str], float], message_ns: float) -> float:
        """From what a rank computes in a step, what of that in each of its stages, and what a message takes."""
        if not self.orders:
            return compute_ns * (self.ranks - 1) / self.count
        each = self._each(took)
        busy = sum(each[what, self._part(stage)] for stage, what, _ in self.orders[self.rank])
        return self._end(each, message_ns) - busy

    def _part(self, stage: int) -> int:
        """Whether a stage is the first or the second one of its rank."""
        return int(stage >= self.ranks)

    def _each(self, took: Mapping[tuple[int, str], float]) -> dict[tuple[str, int], float]:
        """What is computed of one micro-batch in the first and the second stage of any rank: as in this one's.

        The first stage of all has no gradient of inputs to compute. Where a backward is cut is read off the others.
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

    def _end(self, each: Mapping[tuple[str, int], float], message_ns: float) -> float:
        """When the last rank is done, if each begins with its next work as soon as that has what it needs."""
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
        """What a neighbouring stage, on whatever rank, has to compute before."""
        stage, what, number = work
        if what == FORWARD:
            return (stage - 1, what, number) if stage else None
        if what == OF_WEIGHTS or stage == 2 * self.ranks - 1:
            return None
        return (stage + 1, what, number)


def waiting(schedule: str, made: Schedule, ranks: int, rank: int, count: int) -> Waiting:
    """How long a rank waits under a schedule that is made."""
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
