"""The ledger of storages, and predictions of a rank: what they count, and what they refuse."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magis.capture.workload import fake_tensors
from magis.extensions.models.building import REAL
from magis.extensions.models.decoders import GptNeoConfig, gpt_neo
from magis.extensions.models.encoders import BertConfig, bert
from magis.extensions.ranks.strategies.distributed import of_kind
from magis.predict import LiveStorage, predict_rank
from magis.results import RankMemory
from magis.strategies import distributed_strategy


def parameters(memory: RankMemory, *names: str) -> int:
    return sum(term.nbytes for term in memory.terms if term.name in names)


Moves = st.lists(st.tuples(st.sampled_from(["new", "drop", "view", "grow", "free"]), st.integers(0, 5)), max_size=25)


@pytest.mark.parametrize("fake", [False, True])
@settings(max_examples=40)
@given(moves=Moves)
def test_the_peak_is_the_most_that_was_alive(fake: bool, moves: list[tuple[str, int]]) -> None:
    def run() -> tuple[int, int]:
        held: list[Tensor] = []
        sizes: list[int] = []
        most = 0
        with LiveStorage() as ledger:
            ledger.open_window()
            for move, n in moves:
                if move == "new":
                    held.append(torch.empty(n + 1))
                    sizes.append(4 * (n + 1))
                elif held and move == "drop":
                    at = n % len(held)
                    del held[at], sizes[at]
                elif held and move == "view":
                    if sizes[n % len(held)]:  # a view of nothing is not one
                        kept = [held[n % len(held)].view(-1)[:1].detach()]  # of the same bytes
                        kept.clear()
                elif held:
                    at = n % len(held)
                    sizes[at] = 4 * (n + 7) if move == "grow" else 0
                    held[at].untyped_storage().resize_(sizes[at])
                most = max(most, sum(sizes))
            return ledger.peak_bytes, most

    with fake_tensors() if fake else nullcontext():
        peak, most = run()
    assert peak == most


def test_bytes_at_the_peak_are_told_apart_by_kind() -> None:
    with LiveStorage() as ledger:
        weight = torch.zeros(10)
        other = torch.zeros(3)
        ledger.name("parameters", weight)
        ledger.name_rest("communication buckets")
        ledger.open_window()
        with of_kind("gradients"):
            grad = weight + 1
        big = torch.zeros(100)
        big.untyped_storage().resize_(800)
        del big
        last = torch.zeros(5)
        ledger.close_window()
        after = torch.zeros(1000)
    assert ledger.at_peak() == {
        "gathered parameters": 800, "parameters": 40, "gradients": 40, "communication buckets": 12,
    }  # fmt: skip
    assert ledger.peak_bytes == 892
    del other, grad, last, after


def tiny(batch: int = 8, layers: int = 2) -> BertConfig:
    return BertConfig(batch, seq_len=8, layers=layers, width=16, heads=2, vocab_size=32, max_positions=8)


@pytest.mark.parametrize("name", ["ddp", "amp+zero3", "amp+tp+pp"])
def test_the_terms_sum_up_to_the_peak(name: str) -> None:
    make = partial(bert, tiny(), REAL, "bert", 0)
    size = max(2, distributed_strategy(name).group)
    found = predict_rank(distributed_strategy(name), make, size, 1, device="cuda")
    assert found.predicted is not None
    assert found.measured is None
    assert sum(term.nbytes for term in found.terms) == found.predicted.tensor_bytes == found.predicted.peak_bytes
    assert all(term.nbytes > 0 for term in found.terms)
    if name == "ddp":
        assert found == predict_rank(distributed_strategy(name), make, size, 1, device="cuda")


def test_weights_and_state_are_as_the_documents_say() -> None:
    """docs/strategies.md, on sizes at which weights outweigh all else."""
    make = partial(bert, tiny(batch=4, layers=1), REAL, "bert", 0)
    count = sum(p.numel() for p in make().module.parameters())
    scalars = 4 * 100  # step counts, padding
    for name, weights, state in (("ddp", 4, 8), ("amp+zero1", 2, 3), ("oss+sdp", 4, 2)):
        found = predict_rank(distributed_strategy(name), make, 4, 0)
        assert abs(parameters(found, "parameters") - weights * count) <= scalars, name
        slack = 0.15 * state * count if name == "oss+sdp" else scalars  # whole parameters do not come out even
        assert abs(parameters(found, "optimizer state") - state * count) <= slack, name
        assert name != "ddp" or parameters(found, "communication buckets") == 4 * count


def test_a_gpu_is_predicted_at_the_sizes_of_papers() -> None:
    sizes = GptNeoConfig(batch_size=2, seq_len=1024, layers=2, width=2048, heads=32, max_positions=1024)
    make = partial(gpt_neo, sizes, REAL, "gpt_neo", 0)
    before = gc.get_freeze_count()
    found = predict_rank(distributed_strategy("amp+zero1"), make, 2, 0, device="cuda")
    assert gc.get_freeze_count() == before
    weights = 2 * (50257 * 2048 + 1024 * 2048 + 2 * (12 * 2048**2 + 2048 * (4 + 1 + 1 + 4)) + 2 * 2048)
    assert parameters(found, "parameters") == pytest.approx(weights, rel=1e-3)
