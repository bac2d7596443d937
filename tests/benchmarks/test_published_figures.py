"""Published figures: the arithmetic of a prediction, and (soak) the bars on the whole table."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.lib.published_figures import ASSUMED, ROWS, Prediction, predicted, reported_rank
from magis.results import Memory, RankMemory, Term
from magis.strategies.distributed_names import group_of, is_distributed
from magis.units import GIB, MIB


def prediction(*peaks: int, reserved: int = 0, extra: int = 0, reported: int = 0) -> Prediction:
    ranks = tuple(RankMemory(rank, Memory(peak, peak, reserved or peak)) for rank, peak in enumerate(peaks))
    return Prediction(ranks, (Term("buffers", extra),) if extra else (), reported, 1.0)


def test_every_row_names_a_strategy_that_four_ranks_can_run() -> None:
    assert all(is_distributed(row.strategy) and 4 % group_of(row.strategy) == 0 for row in ROWS)
    assert sum(row.is_scored for row in ROWS) == 9
    assert [row.strategy for row in ROWS if row.out_of_memory] == ["ddp"]


@pytest.mark.parametrize(
    ("name", "rank"), [("ddp", 0), ("half+tp2", 0), ("half+pp2", 1), ("half+pp4", 3), ("tp2+pp2", 3)]
)
def test_the_rank_that_knows_the_loss_is_compared(name: str, rank: int) -> None:
    assert reported_rank(name) == rank


def test_what_a_library_adds_counts_in_the_peak_and_in_what_must_fit() -> None:
    ours = prediction(5 * GIB, 3 * GIB, extra=GIB, reported=1)
    assert ours.peak_bytes(1) == 4 * GIB
    assert ours.needed_bytes == 5 * GIB + GIB + ASSUMED.context_bytes


def test_what_must_fit_is_what_the_allocator_reserves_and_the_context() -> None:
    room = ASSUMED.memory_bytes - ASSUMED.context_bytes
    assert prediction(GIB, reserved=room).fits
    assert not prediction(GIB, reserved=room + MIB).fits


@pytest.mark.soak
def test_the_bars() -> None:
    found = [(row, predicted(row)) for row in ROWS if row.is_scored]
    for row, ours in found:
        assert ours.fits is not row.out_of_memory, row.title
    errors = [abs(ours.peak_bytes(ours.reported) / MIB / row.peak_mib - 1) for row, ours in found if row.peak_mib]
    assert len(errors) == 8
    assert max(errors) <= 0.15
    assert statistics.median(errors) <= 0.07
