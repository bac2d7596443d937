"""What strategies are made of, each held to a plain counterpart: flat buffers, buckets, cuts, loss scaling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from magis.capture import Workload
from magis.extensions.models.building import REAL, SEED, Style
from magis.extensions.models.convnets import MlpConfig, mlp
from magis.extensions.models.decoders import BtlmConfig, GptNeoConfig, btlm, gpt_neo
from magis.extensions.models.encoders import BertConfig, VitConfig, bert, vit
from magis.extensions.ranks.strategies.distributed import LossScaler, Masters, average_gradients, buckets
from magis.extensions.ranks.strategies.stage_cuts import cut_of, keep_stages, run_stage, stage_blocks
from magis.extensions.ranks.strategies.zero import FlatBuffer, Zero, _owners
from magis.ops.optimizers import OptimizerSpec, ParameterGroup, torch_optimizer
from magis.predict import fake_world
from magis.strategies import World, distributed_strategy
from magis.strategies.rank_step import without_dropout


def small(name: str, style: Style = REAL) -> Workload:
    if name == "bert":
        sizes = BertConfig(8, seq_len=8, layers=3, width=16, heads=2, vocab_size=32, max_positions=8)
        return bert(sizes, style, name, 0)
    if name == "gpt_neo":
        neo = GptNeoConfig(8, seq_len=8, layers=3, width=16, heads=2, window=3, vocab_size=32, max_positions=8)
        return gpt_neo(neo, style, name, 0)
    if name == "btlm":
        sizes_btlm = BtlmConfig(8, seq_len=8, layers=3, width=16, inner=24, heads=2, vocab_size=32, mup_base_width=16)
        return btlm(sizes_btlm, style, name, 0)
    if name == "vit":
        sizes_vit = VitConfig(8, image_size=8, patch_size=4, layers=3, width=16, inner=32, heads=2, classes=5)
        return vit(sizes_vit, style, name, 0)
    return mlp(MlpConfig(batch_size=8, inputs=4, hidden=8, layers=3, classes=4), style, name, 0)


@contextmanager
def alone() -> Iterator[World]:
    """A world of one real rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World()
    finally:
        dist.destroy_process_group()


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 5), st.data())
def test_pieces_of_all_ranks_are_the_parameters_once(counts: list[int], ranks: int, data: st.DataObject) -> None:
    length = -(-sum(counts) // ranks)
    seen: dict[tuple[str, int], int] = {}
    for rank in range(ranks):
        with fake_world(ranks, rank):
            named = {f"p{i}": nn.Parameter(torch.arange(n, dtype=torch.float32)) for i, n in enumerate(counts)}
            flat = FlatBuffer(named, torch.float32, sharded=data.draw(st.booleans()))
            for name, start, place, size in flat.pieces():
                assert torch.equal(flat.master[place : place + size], torch.arange(start, start + size).float())
                seen.update({(name, element): rank for element in range(start, start + size)})
    assert len(seen) == sum(counts)
    start = 0
    for i, count in enumerate(counts):  # who owns what, by the rule that reduces gradients
        for owner, low, high in _owners(start, count, length):
            assert all(seen[f"p{i}", element - start] == owner for element in range(low, high))
        start += count


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=12), st.integers(4, 80))
def test_buckets_keep_the_order_and_the_limit(given_grads: list[tuple[int, bool]], most: int) -> None:
    grads = [torch.zeros(n, dtype=torch.bfloat16 if low else torch.float32) for n, low in given_grads]
    found = [[grads[number] for number in each] for each in buckets(dict(enumerate(grads)), most)]
    assert [id(g) for bucket in found for g in bucket] == [id(g) for g in grads]
    for bucket in found:
        assert len({g.dtype for g in bucket}) == 1
        assert len(bucket) == 1 or sum(g.numel() * g.element_size() for g in bucket) <= most


def test_averaging_divides_and_puts_back() -> None:
    # fake ranks send nothing, so a sum over two of them is this rank's own: the mean is half of it
    with fake_world(2, 0):
        parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 5, 2)]
        for parameter in (parameters[0], parameters[2]):
            parameter.grad = torch.full_like(parameter, 4.0)
        average_gradients(parameters, None, bucket_bytes=16)
    assert parameters[1].grad is None
    assert all(
        torch.equal(p.grad, torch.full_like(p, 2.0)) for p in (parameters[0], parameters[2]) if p.grad is not None
    )


@pytest.mark.parametrize("ranks", [((0,), (1,)), ((0, 2), (1,))])
@pytest.mark.parametrize("style", [REAL, SEED])
@pytest.mark.parametrize("name", ["bert", "gpt_neo", "btlm", "vit"])
def test_a_cut_network_computes_what_the_whole_one_does(
    name: str, style: Style, ranks: tuple[tuple[int, ...], ...]
) -> None:
    whole, stages = small(name, style), sum(map(len, ranks))
    without_dropout(whole.module)
    expected = whole.loss_fn(whole.module(*whole.inputs), *whole.targets)
    works: dict[int, Workload] = {}
    cut = cut_of(whole, stages)
    for held in ranks:
        work = small(name, style)
        without_dropout(work.module)
        keep_stages(work, cut, stages, held)
        works |= dict.fromkeys(held, work)
    x: Any = None
    for stage in range(stages):
        work = works[stage]
        blocks = stage_blocks(len(cut.blocks), stages, stage)
        x = run_stage(work.module, cut, blocks, work.inputs, x, last=stage == stages - 1)
    assert torch.equal(work.loss_fn(x, *work.targets), expected)
    named = dict(whole.module.named_parameters())
    tied = named[cut.tied[0]].numel() if cut.tied and (0, 2) not in ranks else 0
    each = {id(work): work for work in works.values()}.values()
    assert (
        sum(p.numel() for work in each for p in work.module.parameters())
        == sum(map(Tensor.numel, named.values())) + tied
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_on_one_rank_is_the_plain_step_bit_for_bit_with_groups(stage: int) -> None:
    group = ParameterGroup(("norm.weight", "layers.1.feed_forward.up.weight"), lr=3e-2, weight_decay=0.1)
    rule = OptimizerSpec("adamw", lr=1e-2, groups=(group,))
    plain, work = (replace(small("gpt_neo"), optimizer=rule) for _ in range(2))
    optimizer = torch_optimizer(rule, dict(plain.module.named_parameters()))
    assert optimizer is not None
    with alone() as world:
        step = Zero(stage, bucket_elements=700, persistent=20).prepare(work, world)
        for _ in range(3):
            optimizer.zero_grad()
            loss = plain.loss_fn(plain.module(*plain.inputs), *plain.targets)
            loss.backward()
            optimizer.step()
            step.prepare()
            assert torch.equal(step.run(), loss.detach())


def test_half_precision_keeps_float32_masters() -> None:
    with alone() as world:
        step = distributed_strategy("amp+zero2").prepare(small("gpt_neo"), world)
        step.prepare()
        step.run()
        masters = [p for g in step.optimizer.param_groups for p in g["params"]]
        assert {p.dtype for p in step.module.parameters()} == {torch.bfloat16}
        assert {p.dtype for p in masters} == {torch.float32}
        rounded = torch.cat([p.to(torch.bfloat16).flatten() for p in masters])
        assert torch.equal(rounded, torch.cat([p.detach().flatten() for p in step.module.parameters()]))


def test_masters_move_as_float32_weights_would_and_the_weights_are_their_copies() -> None:
    torch.manual_seed(0)
    half = nn.Linear(5, 3).to(torch.bfloat16)
    alone = [nn.Parameter(p.detach().float()) for p in half.parameters()]
    rule = OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1)
    ours = Masters(dict(half.named_parameters()), lambda given: torch_optimizer(rule, dict(given)))
    theirs = torch_optimizer(rule, {str(index): p for index, p in enumerate(alone)})
    assert theirs is not None
    for _ in range(4):
        half(torch.randn(2, 5, dtype=torch.bfloat16)).float().square().sum().backward()
        for weight, master in zip(half.parameters(), alone, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        ours.step()
        theirs.step()
        assert all(weight.grad is None for weight in half.parameters())
    masters = [tensor for kind, tensor in ours.held() if kind == "master weights"]
    for master, expected, weight in zip(masters, alone, half.parameters(), strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master, expected)
        assert torch.equal(weight, expected.to(torch.bfloat16))
    small = [float((m - w.float()).detach().abs().max()) for m, w in zip(masters, half.parameters(), strict=True)]
    assert max(small) > 0, "the masters are no finer than the weights"


def scaled_step(scaler: LossScaler, grad: float) -> tuple[Tensor, Tensor]:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), grad)
    scaler.step(torch.optim.SGD([weight], lr=1.0), [weight.grad])
    return weight.detach(), weight.grad


def test_loss_scaling_divides_skips_and_grows() -> None:
    scaler = LossScaler(World(), enabled=True, first=8.0, interval=2)
    assert scaler.scaled(torch.tensor(3.0)) == 24
    weight, grad = scaled_step(scaler, 4.0)
    assert (weight[0].item(), grad[0].item(), scaler.scale) == (0.5, 0.5, 8.0)
    weight, _ = scaled_step(scaler, float("inf"))
    assert (weight[0].item(), scaler.scale) == (1.0, 4.0)  # left alone
    for _ in range(2):
        scaled_step(scaler, 1.0)
    assert scaler.scale == 8.0
    assert LossScaler(World(), enabled=False).scaled(torch.tensor(3.0)) == 3
