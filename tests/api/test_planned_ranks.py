"""Ranks that run a plan: every rank's bytes as planned, numbers of the unplanned ranks, and lines where they part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magis.capture import Workload
from magis.cases.run_case import run_case
from magis.errors import MagisError
from magis.extensions.ranks import RankJob, RankPool, RankReport
from magis.extensions.ranks.planned_rank_cases import numbers_of
from magis.extensions.ranks.plans.planned_ranks import PlannedRanks
from magis.extensions.ranks.plans.sharded_weights import shard_weights
from magis.extensions.ranks.prediction.rank_memory import fake_world
from magis.graph import digest
from magis.ops.collectives import group_name, is_collective, ranks_of
from magis.ops.exchanges import EXCHANGE
from magis.ops.optimizers import OptimizerSpec, ParameterGroup
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case, Memory
from magis.strategies.distributed_names import group_of
from magis.strategies.rank_step import World
from magis.strategies.single_device import on_fake_tensors
from tests.api.cut_nets import three_heads, two_heads

TIED = "tests.api.nets:tied"
CUT = {
    "three heads": "tests.api.cut_nets:three_heads",
    "dropped heads": "tests.api.cut_nets:dropped_heads",
    "two heads": "tests.api.cut_nets:two_heads",
}
PLANNED = ("magis+ddp", "magis+fsdp")
"""Whose ranks all run one step."""
SMALL_BUDGET = 200


class Odd(nn.Module):
    """Three layers of widths that two ranks and three do not divide; one weight is tied, one parameter frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.ones(1, 7), requires_grad=False)
        self.second.weight = nn.Parameter(torch.randn(7, 5))
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        out: Tensor = (self.second(y) + self.again(torch.relu(y))) * self.scale
        return out


def odd() -> Workload:
    """A batch of twelve."""
    torch.manual_seed(0)
    rule = OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1)
    return Workload(
        "odd", Odd(), (torch.randn(12, 7),), (torch.randn(12, 7),), nn.functional.mse_loss, rule, blocks=("first",)
    )


def subject(name: str, ranks: int, rank: int) -> Subject:
    strategy = PlannedRanks(name)
    work = on_fake_tensors(odd())[1]
    return strategy.subject(strategy.own_part(work, World(ranks, rank, fake=True)))


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_one_step(name: str, ranks: int) -> None:
    found = set()
    for rank in range(ranks):
        with fake_world(ranks, rank):
            graph = subject(name, ranks, rank).captured.graph
        found.add(digest(graph))
        messages = [op for op in graph.ops if is_collective(op.target)]
        assert {ranks_of(op) for op in messages} == {ranks}
        assert len(messages) == (4 if name == "magis+fsdp" else 2), "one of each kind for each unit"
    assert len(found) == 1


def test_shards_hold_the_weights_and_are_padded_with_zeros() -> None:
    whole = {name: p.detach().clone() for name, p in odd().module.named_parameters()}
    parts = []
    for rank in range(3):
        work = odd()
        shard_weights(work.module, work.blocks, 3, rank, group_name("dp", 3))
        assert work.module.again.weight is work.module.second.weight
        parts.append(dict(work.module.named_parameters()))
    for name, tensor in whole.items():
        joined = torch.cat([part[name].detach() for part in parts])
        assert torch.equal(joined[: len(tensor)], tensor)
        assert not joined[len(tensor) :].any()
        assert {part[name].shape for part in parts} == {parts[0][name].shape}
        assert parts[0][name].requires_grad == (name != "scale")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with closing(Bench()) as found:
        yield found


@pytest.mark.parametrize("strategy", PLANNED)
def test_two_ranks_run_their_plan(strategy: str, bench: Bench) -> None:
    case = Case(TIED, strategy, "cpu", "small", memory_ratio=0.8, ranks=2, budget=SMALL_BUDGET)
    result = run_case(case, cache=bench)
    assert result.search.feasible
    assert result.numbers == "bit-identical"
    assert result.note == ""
    planned = result.optimized.simulated.tensor_bytes
    assert planned <= (result.memory_limit_bytes or 0)
    assert [rank.measured.tensor_bytes for rank in result.ranks if rank.measured] == [planned, planned]
    assert result.original.simulated.tensor_bytes > planned


@pytest.mark.parametrize(
    ("strategy", "ranks", "model"),
    [
        pytest.param("magis+tp2", 2, "two heads", marks=pytest.mark.soak),
        ("magis+tp2", 4, "three heads"),
        ("magis+tp2", 2, "dropped heads"),
        ("magis+tp2+sp", 2, "two heads"),
        ("magis+pp2", 4, "two heads"),
        pytest.param("magis+pp3", 3, "three heads", marks=pytest.mark.soak),
    ],
)
def test_ranks_with_parts_of_their_own_run_plans_of_their_own(
    strategy: str, ranks: int, model: str, bench: Bench
) -> None:
    case = Case(CUT[model], strategy, "cpu", "small", memory_ratio=0.8, ranks=ranks, budget=SMALL_BUDGET)
    result = run_case(case, cache=bench)
    assert result.search.feasible
    assert result.numbers == "bit-identical"
    assert result.note == ""
    planned = [rank.predicted.tensor_bytes for rank in result.ranks if rank.predicted]
    assert max(planned) <= 0.8 * result.original.simulated.tensor_bytes
    assert planned == [rank.measured.tensor_bytes for rank in result.ranks if rank.measured]
    assert len(planned) == ranks
    group = group_of(strategy)
    assert planned == planned[:group] * (ranks // group), "replicas run one plan"


def test_messages_between_ranks_with_other_steps_keep_their_order() -> None:
    strategy = PlannedRanks("magis+pp3")
    for rank in range(3):
        with fake_world(3, rank):
            work = on_fake_tensors(three_heads())[1]
            graph = strategy.subject(strategy.own_part(work, World(3, rank, fake=True))).captured.graph
        written = [op.writes for op in graph.ops if op.target == EXCHANGE]
        (storage,) = {storage for writes in written for storage, _ in writes}
        versions = [version for writes in written for _, version in writes]
        assert graph.storages[storage].kind == "generator"
        assert versions == sorted(set(versions))
        assert len(versions) == [6, 11, 5][rank]


def report(loss: float, weights: str) -> RankReport:
    return RankReport(0, Memory(1, 1), (1.0,), (loss, None), weights)


@pytest.mark.parametrize(
    ("loss", "weights", "loops", "said"),
    [
        (1.0, "a", True, "bit-identical"),
        (1.0, "b", False, "differs: weights after three steps"),
        (1.0, "b", True, "another order of sums: loss within 0%"),
        (1.00001, "b", True, "another order of sums: loss within 0.001%"),
        (1.00001, "b", False, "differs: loss by 0.001%"),
        (1.01, "b", True, "differs: loss by 1%"),
    ],
)
def test_numbers_of_a_plan_without_loops_are_held_bit_by_bit(loss: float, weights: str, loops: bool, said: str) -> None:
    assert numbers_of([report(loss, weights)], [report(1.0, "a")], loops=loops) == said


def test_a_stage_with_its_own_optimizer_groups_and_targets_that_are_no_batch() -> None:
    given = two_heads()
    names = tuple(name for name, _ in given.module.named_parameters() if name.startswith("layers.1."))
    rule = replace(given.optimizer, groups=(ParameterGroup(names, lr=1e-2),))

    def loss(output: Any, scale: Tensor, *targets: Tensor) -> Tensor:
        return given.loss_fn(output, *targets) * scale

    work = replace(given, optimizer=rule, targets=(torch.ones(()), *given.targets), loss_fn=loss)
    for rank in range(2):
        strategy = PlannedRanks("magis+pp2")
        with fake_world(2, rank):
            own = strategy.own_part(on_fake_tensors(work)[1], World(2, rank, fake=True))
            graph = strategy.subject(own).captured.graph
        assert len(own.optimizer.groups[0].parameters) == (len(names) if rank else 0)
        assert any(op.target == EXCHANGE for op in graph.ops)


@pytest.mark.parametrize(
    ("factory", "line"),
    [
        ("of_another_width", "the step of rank 1 is another one than that of rank 0"),
        ("not_captured", "rank 1 has no step: "),
        ("reads_another_plan", "the plan of rank 1 is another one than that of rank 0"),
        ("dies_while_planning", "rank 0 of 2 was killed by SIGKILL during the preparation of the step"),
    ],
)
def test_ranks_that_do_not_agree_end_with_one_line(factory: str, line: str) -> None:
    with RankPool(2, "cpu") as pool, pytest.raises(MagisError, match=line) as raised:
        pool.run(RankJob("tests.ranks.own_strategies:small_net", f"tests.ranks.planned_strategies:{factory}", rounds=1))
    assert "\n" not in str(raised.value)
