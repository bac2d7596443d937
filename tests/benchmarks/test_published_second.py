"""The second set of published figures: its rows and sources, what a figure counts, and what libraries do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from benchmarks.lib.published_libraries import (
    Megatron,
    vocabulary_loss,
)
from benchmarks.lib.published_models import BertClassifier, BookGpt, VisionTransformer, WrittenLlama
from benchmarks.lib.published_second import ALLOCATED, LIBRARIES, ROWS, counted
from magis.capture import Workload
from magis.capture.workload import fake_tensors
from magis.extensions.models.building import REAL, WRITTEN_OUT
from magis.extensions.models.decoders import GptConfig, gpt
from magis.extensions.models.encoders import BertConfig
from magis.predict import predict_rank
from magis.results import Memory, RankMemory, Term
from magis.units import MIB


def test_every_row_has_whole_groups_and_a_rank_that_is_there() -> None:
    for row in ROWS:
        assert row.ranks % row.strategy.group == 0
        assert row.reported < row.ranks


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_networks_have_the_parameters_of_those_that_were_measured() -> None:
    with fake_tensors():
        assert parameters(VisionTransformer()) == 303_311_882  # torchvision's vit_l_16 with ten classes
        assert parameters(BookGpt("mask", scratch=True)) == 163_009_536  # as the book counts them
        assert parameters(WrittenLlama(22, 2048, 2048, 5632, 32, 4, 32000)) == 1_100_048_384  # TinyLlama
        assert parameters(WrittenLlama(32, 8192, 4096, 14336, 32, 8, 128256, packed=False)) == 8_030_261_248
        large = BertConfig(layers=24, width=1024, heads=16)
        assert parameters(BertClassifier(large)) == 335_143_938  # bert-large-uncased with two classes


@pytest.mark.parametrize(
    ("library", "peak", "reserved", "expected"),
    [
        ("Megatron-LM", 100, 130, 100 + 64 + 7),
        ("torchtitan", 100, 130, 100 + 64 + 7),  # segments that grow: no gaps
        ("transformers", 100, 130, 130 + 1343 + 7),
    ],
)
def test_a_figure_counts_what_its_library_prints(library: str, peak: int, reserved: int, expected: int) -> None:
    row = replace(ROWS[0], library=library, terms=(Term("buffer", 7 * MIB),))
    memory = RankMemory(0, predicted=Memory(peak * MIB, peak * MIB, reserved * MIB))
    assert counted(row, memory) == expected * MIB
    assert (LIBRARIES[library].counts == ALLOCATED) == (library == "Megatron-LM")


def small(*, dropout: float = 0.1, fused: bool = False, batch: int = 8) -> Workload:
    config = GptConfig(batch_size=batch, seq_len=64, layers=2, width=64, heads=4, vocab_size=256, dropout=dropout)
    return gpt(config, REAL if fused else WRITTEN_OUT, "gpt", 0)


def kinds(strategy: Any, make: Any, ranks: int = 8, rank: int = 0) -> dict[str, int]:
    memory = predict_rank(strategy, make, ranks, rank, device="cuda")
    return {term.name: term.nbytes for term in memory.terms}


def test_megatron_holds_what_its_documentation_says_of_a_parameter() -> None:
    def make() -> Workload:
        return replace(small(), loss_fn=vocabulary_loss)

    count = parameters(small().module)
    for strategy, gradients, masters in (
        (Megatron(), 2, 4),
        (Megatron(dtype="bfloat16"), 4, 4),
        (Megatron(sharded=True), 2, 0.5),
    ):
        found = kinds(strategy, make)
        assert found["parameters"] == 2 * count
        assert found["gradients"] == gradients * count
        assert found["master weights"] == pytest.approx(masters * count, rel=0.01)
        assert found["optimizer state"] == pytest.approx(2 * masters * count, rel=0.01)
