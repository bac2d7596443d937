"""A vocabulary in parts: eager's losses and weights, no whole logits, and losses that need them whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.distributed.tensor import DTensor, Shard

from magis.extensions.models.building import REAL
from magis.extensions.models.decoders import GptNeoConfig, gpt_neo
from magis.extensions.models.encoders import BertConfig, bert
from magis.extensions.ranks import RankJob, RankPool
from magis.extensions.ranks.strategies.model_parallel import ModelParallel
from magis.predict import fake_world, predict_rank
from magis.strategies import World, distributed_strategy

BESIDE = "tests.steps_of_strategies.beside_eager"


def test_two_ranks_train_the_weights_that_one_does() -> None:
    with RankPool(2, "cpu") as pool:
        for strategy in ("tensor_parallel", "sequence_parallel"):
            for net in ("two_heads", "three_heads", "packed"):  # that of three_heads is odd
                pool.run(RankJob(f"tests.api.cut_nets:{net}", f"{BESIDE}:{strategy}", rounds=1))


@pytest.mark.parametrize(("rank", "words"), [(0, 17), (1, 16)])
def test_no_rank_holds_all_logits(rank: int, words: int) -> None:
    work = bert(BertConfig(4, seq_len=8, layers=1, width=16, heads=2, vocab_size=33, max_positions=8), REAL, "bert", 0)
    with fake_world(2, rank):
        step: Any = ModelParallel(2).prepare(work, World(2, rank, fake=True))
        logits, _ = step.module(*step.work.inputs)
        assert isinstance(logits, DTensor)
        assert logits.shape == (4, 8, 33)
        assert logits.to_local().shape == (4, 8, words)
        named = dict(step.module.named_parameters())
        for name, width in (("embeddings.word.weight", 16), ("decoder_bias", 1)):
            part: Any = named[name].data
            assert part.to_local().numel() == words * width
            assert part.to_local().untyped_storage().nbytes() == 4 * 17 * width, "torch sends equal parts"
        step.run()
        grad: Any = named["embeddings.word.weight"].grad
        assert grad.placements == (Shard(0),)


def test_what_a_rank_has_of_a_vocabulary_is_predicted() -> None:
    sizes = GptNeoConfig(4, seq_len=8, layers=1, width=16, heads=2, window=3, vocab_size=4096, max_positions=8)
    make = partial(gpt_neo, sizes, REAL, "gpt_neo", 0)
    whole, part = (predict_rank(distributed_strategy(name), make, 2, 0) for name in ("ddp", "tp"))
    found = [{term.name: term.nbytes for term in memory.terms} for memory in (whole, part)]
    for kind in ("parameters", "optimizer state"):
        assert found[1][kind] < 0.55 * found[0][kind]
