"""A vocabulary in parts: eager's losses and weights, no whole logits, and losses that need them whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from magis.capture import Workload
from magis.errors import UsageError
from magis.extensions.models.building import REAL
from magis.extensions.models.decoders import GptNeoConfig, gpt_neo
from magis.extensions.models.encoders import BertConfig, VitConfig, bert, vit
from magis.extensions.ranks import RankJob, RankPool
from magis.extensions.ranks.strategies.distributed import local, mesh
from magis.extensions.ranks.strategies.model_parallel import ModelParallel
from magis.extensions.ranks.strategies.tensor_cuts import share_network
from magis.extensions.ranks.strategies.vocabulary import LossOfParts
from magis.predict import fake_world, predict_rank
from magis.strategies import World, distributed_strategy
from tests.steps_of_strategies.test_parts import alone, small

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


def test_a_network_without_a_vocabulary_is_as_it_was() -> None:
    work = vit(VitConfig(4, image_size=8, patch_size=4, layers=1, width=16, inner=32, heads=2, classes=5), REAL, "v", 0)
    with fake_world(2, 0):
        assert share_network(work, mesh(World(2, 0, fake=True), {"tp": 2})).loss_fn is work.loss_fn


def test_a_rank_without_a_word_is_refused() -> None:
    work = bert(BertConfig(4, seq_len=8, layers=1, width=16, heads=4, vocab_size=5, max_positions=8), REAL, "bert", 0)
    with fake_world(4, 0), pytest.raises(UsageError, match="a vocabulary of 5 leaves one of 4 ranks without a part"):
        ModelParallel(4).prepare(work, World(4, 0, fake=True))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: vit(VitConfig(2, image_size=8, patch_size=4, layers=1, width=16, inner=32, heads=2), REAL, "v", 0),
            "Vit",
        ),
        (
            lambda: bert(BertConfig(2, seq_len=7, layers=1, width=16, heads=2, vocab_size=9), REAL, "b", 0),
            "of 7 tokens",
        ),
    ],
)
def test_a_sequence_that_cannot_be_cut_is_refused(make: Callable[[], Workload], line: str) -> None:
    with fake_world(2, 0), pytest.raises(UsageError, match=line) as caught:
        ModelParallel(2, sequence=True).prepare(make(), World(2, 0, fake=True))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gpt_neo", "btlm", "bert"])
def test_norms_keep_a_part_of_the_sequence(name: str) -> None:
    seen: dict[str, tuple[int, ...]] = {}
    work = small(name)
    for path, part in work.module.named_modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.register_forward_pre_hook(lambda _, args, path=path: seen.update({path: local(args[0]).shape}))
    with fake_world(2, 0):
        ModelParallel(2, sequence=True).prepare(work, World(2, 0, fake=True)).run()
    whole = seen.pop("transform_norm", None)
    assert whole in (None, (8, 8, 16))
    assert set(seen.values()) == {(8, 4, 16)}


def cross_entropy(logits: Tensor, target: Tensor, **asked: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), **asked).sum()


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), target[:, 1:].flatten())


def criterion(logits: Tensor, target: Tensor) -> Tensor:
    return torch.nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), target.view(-1))


def of_channels(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), target)


def another(logits: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(logits.softmax(-1).amax(-1), target.float()) + logits.square().mean()


def masked(logits: Tensor, target: Tensor) -> Tensor:
    chosen = target > 1
    return functional.cross_entropy(logits[chosen], target[chosen])


def picked(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, [0, 2]].flatten(0, 1), target[:, [0, 2]].flatten())


def summed(logits: Tensor, target: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the old word for a sum
        return cross_entropy(logits, target, size_average=False)


@pytest.mark.parametrize(
    ("loss", "is_whole"),
    [
        (cross_entropy, False),
        (shifted, False),
        (criterion, False),
        (partial(cross_entropy, ignore_index=3), False),
        (partial(cross_entropy, reduction="sum"), False),
        (partial(cross_entropy, reduction="none"), False),
        (partial(cross_entropy, label_smoothing=0.1), True),
        (partial(cross_entropy, weight=torch.arange(1.0, 6.0)), True),
        (of_channels, True),
        (masked, True),
        (picked, True),
        (summed, True),
        (another, True),
    ],
)
def test_losses_get_what_they_need(
    loss: Callable[..., Tensor], is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[DTensor] = []
    usual = DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda self: (whole.append(self), usual(self))[1])
    torch.manual_seed(0)
    target = torch.randint(0, 5, (2, 3))
    one, other = (torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    expected = loss(one, target)
    expected.backward()
    with alone() as world:
        found = LossOfParts(loss)(DTensor.from_local(other, mesh(world, {"tp": 1}), [Shard(-1)]), target)
        assert type(found) is Tensor
        found.backward()
    assert bool(whole) == is_whole
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(other.grad, one.grad)


def test_under_autocast_logits_are_summed_in_float32() -> None:
    with alone() as world, torch.autocast("cpu", torch.bfloat16):
        logits = torch.randn(2, 3, 5).bfloat16()
        parts = DTensor.from_local(logits, mesh(world, {"tp": 1}), [Shard(-1)])
        target = torch.zeros(2, 3, dtype=torch.long)
        found = LossOfParts(cross_entropy)(parts, target)
        torch.testing.assert_close(found, cross_entropy(logits, target))
    assert found.dtype == torch.float32
