"""A vendor's published peaks on 4 x V100-32GB, and ours for them: one set of assumptions for all rows.

The assumptions stand in docs/strategies.md; each is either a property of the library that the row names, or one number
of the whole table. None is set for a row by itself. They were settled with the published figures in sight, so that only
rows which nobody has shown us can confirm them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from magis.capture import Workload
from magis.cost.devices import find_device
from magis.extensions.models.building import WRITTEN_OUT
from magis.extensions.models.decoders import GptConfig, gpt
from magis.extensions.models.encoders import BertConfig, bert
from magis.extensions.ranks.prediction.step_time import predict_step
from magis.extensions.ranks.strategies.zero import Zero
from magis.results import RankMemory, Term
from magis.strategies.distributed_names import distributed_strategy, group_of
from magis.strategies.rank_step import RankStrategy
from magis.units import GIB, MIB

__all__ = ["ASSUMED", "ROWS", "Assumptions", "Prediction", "Row", "predicted", "reported_rank"]

RANKS = 4


@dataclass(frozen=True)
class Assumptions:
    """Numbers that hold for every row."""

    memory_bytes: int = 32510 * MIB
    """Of a V100-32GB, as its driver reports it."""
    context_bytes: int = GIB
    """CUDA's context and NCCL's buffers: no part of a published peak, but of what must fit."""
    zero_elements: int = 200_000_000
    """allgather_bucket_size and reduce_bucket_size, as Lightning's and Hugging Face's configurations have them."""
    zero_factor: float = 4.5
    """Of both bucket sizes: what the buffers of DeepSpeed take with overlap_comm, by Hugging Face's guide to it."""


ASSUMED = Assumptions()


@dataclass(frozen=True)
class Row:
    """A published row."""

    workload: str
    """ "bert" or "gpt"."""
    title: str
    strategy: str
    samples_per_s: float | None
    peak_mib: int | None
    """None: out of memory, or not published."""
    out_of_memory: bool = False

    @property
    def is_scored(self) -> bool:
        return self.peak_mib is not None or self.out_of_memory


ROWS = (
    Row("bert", "fp32", "ddp", 103.07, 17025),
    Row("bert", "mixed precision", "amp+ddp", 178.15, 12698),
    Row("gpt", "fp32, DDP", "ddp", None, None, out_of_memory=True),
    Row("gpt", "mixed precision", "half+ddp", 9.57, 25061),
    Row("gpt", "mixed precision + OSS", "amp+oss", 6.02, 22077),
    Row("gpt", "mixed precision + ZeRO-1", "amp+zero1", 12.88, 15709),
    Row("gpt", "mixed precision + ZeRO-2", "amp+zero2", 10.27, 15693),
    Row("gpt", "mixed precision, TP 2", "half+tp2", 7.59, 11300),
    Row("gpt", "mixed precision, PP 2", "half+pp2", 8.46, 12375),
    Row("gpt", "mixed precision + ZeRO-3", "amp+zero3", None, None),
    Row("gpt", "mixed precision + FSDP", "amp+fsdp", None, None),
)


@dataclass(frozen=True)
class Prediction:
    """Ours for a row."""

    ranks: tuple[RankMemory, ...]
    """Those that differ."""
    extra: tuple[Term, ...]
    """What the row's library holds beside what ours does."""
    reported: int
    """The rank whose figure is compared: the one that knows the loss."""
    samples_per_s: float

    def peak_bytes(self, rank: int) -> int:
        """Tensors at the peak of a rank: what torch.cuda.max_memory_allocated would say."""
        found = next(each for each in self.ranks if each.rank == rank).predicted
        return (found.peak_bytes if found else 0) + sum(term.nbytes for term in self.extra)

    @property
    def needed_bytes(self) -> int:
        """What the fullest GPU must have: the caching allocator's segments and the context."""
        reserved = max((each.predicted.reserved_bytes or 0 for each in self.ranks if each.predicted), default=0)
        return reserved + sum(term.nbytes for term in self.extra) + ASSUMED.context_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= ASSUMED.memory_bytes


def predicted(row: Row) -> Prediction:
    """Peak and throughput of a row; takes about a minute and next to no memory."""
    chosen, extra = _strategy(row.strategy)
    reported = reported_rank(row.strategy)
    found = {
        rank: predict_step(chosen, lambda: _workload(row), RANKS, rank, find_device("sim:v100"), "cuda")
        for rank in sorted({0, reported})
    }
    ranks = tuple(memory for memory, _ in found.values())
    return Prediction(ranks, extra, reported, _samples(row) / found[reported][1] * 1e3)


def reported_rank(name: str) -> int:
    """The last stage of the first pipeline; rank 0 where all ranks are alike."""
    return group_of(name) - 1 if "pp" in name else 0


def _strategy(name: str) -> tuple[RankStrategy, tuple[Term, ...]]:
    found = distributed_strategy(name)
    if not isinstance(found, Zero) or found.stage == 3:
        return found, ()
    nbytes = 2 * ASSUMED.zero_elements
    more = round(ASSUMED.zero_factor * 2 * nbytes) - nbytes
    term = Term("DeepSpeed's further buffers", more, "4.5 x (allgather + reduce bucket) in half precision, less ours")
    return replace(found, bucket_elements=ASSUMED.zero_elements), (term,)


def _samples(row: Row) -> int:
    """Of a step: as published, but for tp one micro-batch of 1 in each group, since ours does not accumulate."""
    if row.workload == "bert":
        return 64
    return RANKS // group_of(row.strategy) if "tp" in row.strategy and "pp" not in row.strategy else 4


def _workload(row: Row) -> Workload:
    if row.workload == "gpt":
        return gpt(GptConfig(batch_size=_samples(row)), WRITTEN_OUT, "gpt", 0)
    return _kept(bert(BertConfig(batch_size=_samples(row)), WRITTEN_OUT, "bert", 0))


def _kept(work: Workload) -> Workload:
    """As Hugging Face's loops have it: the output, logits and all, lives until the next one replaces it."""
    held: list[Any] = []

    def loss_fn(output: Any, *targets: Tensor) -> Tensor:
        held[:] = [output]
        return work.loss_fn(output, *targets)

    return replace(work, loss_fn=loss_fn)
