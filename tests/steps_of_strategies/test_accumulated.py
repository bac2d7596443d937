"""Gradients of several micro-batches: the names, the numbers of the whole batch, and the bytes as predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from magis.cases.run_case import run_case
from magis.planner.bench import Bench
from magis.results import Case
from magis.strategies import World, distributed_strategy
from magis.strategies.distributed_names import accumulated
from tests.steps_of_strategies.test_parts import alone, small


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with closing(Bench()) as found:
        yield found


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_weights_are_those_of_the_whole_batch(name: str) -> None:
    found = []
    for micro_batches in (1, 4):
        with alone() as world:
            step = distributed_strategy(accumulated(name, micro_batches)).prepare(small("mlp"), world)
            losses = []
            for _ in range(3):
                step.prepare()
                loss = step.run()
                assert loss is not None
                losses.append(loss)
            weights = [getattr(p, "_local_tensor", p).detach().clone() for p in step.module.parameters()]
            found.append([torch.stack(losses), *weights])
    for whole, parts in zip(*found, strict=True):
        assert torch.allclose(whole, parts, atol=1e-6)


def test_a_pipeline_runs_so_many() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        step = distributed_strategy("accumulate8+pp2").prepare(small("bert"), World(2, 0, fake=True))
    finally:
        dist.destroy_process_group()
    assert getattr(step, "count", None) == 8


@pytest.mark.parametrize("name", ["accumulate2+ddp", "accumulate2+fsdp", "accumulate2+tp2"])
def test_two_ranks_need_the_predicted_bytes(name: str, bench: Bench) -> None:
    plain = name.partition("+")[2]
    case = Case("tests.api.cut_nets:two_heads", name, "cpu", "small", ranks=2)
    results = [run_case(each, cache=bench) for each in (case, replace(case, strategy=plain))]
    assert all(result.numbers.startswith("another order of sums") for result in results)
    found = [(each.measured, each.predicted) for each in results[0].ranks if each.measured and each.predicted]
    assert found
    for measured, predicted in found:
        assert measured.tensor_bytes == pytest.approx(predicted.tensor_bytes, rel=0.005)
    assert results[0].optimized.simulated.tensor_bytes < 0.9 * results[1].optimized.simulated.tensor_bytes
