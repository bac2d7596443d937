"""Pipelines with two stages on each rank: bytes and numbers of real ranks, and how long a rank waits for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from magis.capture import Workload
from magis.cost.devices import find_device
from magis.extensions.models.building import REAL
from magis.extensions.models.encoders import BertConfig, bert
from magis.extensions.ranks import RankJob, RankPool, mean_losses
from magis.extensions.ranks.prediction.step_time import predict_step
from magis.extensions.ranks.strategies.model_parallel import PipelineStep
from magis.extensions.ranks.strategies.schedules import (
    BACKWARD,
    FORWARD,
    OF_INPUTS,
    OF_WEIGHTS,
    Waiting,
)
from magis.predict import fake_world
from magis.results import RankMemory
from magis.strategies import World, distributed_strategy
from magis.strategies.rank_step import without_dropout
from tests.api.cut_nets import four_blocks
from tests.steps_of_strategies.plan_nets import losses_alone

V100 = find_device("sim:v100")
SCHEDULES = ("interleaved", "zb", "zbv")
FOUR_BLOCKS = "tests.api.cut_nets:four_blocks"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with closing(RankPool(2, "cpu")) as pool:
        yield pool


def alone() -> list[float]:
    """Losses of three steps of one process on the whole batch, without dropout."""
    work = four_blocks()
    without_dropout(work.module)
    return losses_alone(work)


def predicted(name: str, ranks: int) -> list[int]:
    def tensor_bytes(memory: RankMemory) -> int:
        assert memory.predicted is not None
        return memory.predicted.tensor_bytes

    made = distributed_strategy(name)
    return [tensor_bytes(predict_step(made, four_blocks, ranks, rank, V100)[0]) for rank in range(ranks)]


def compared(pool: RankPool, name: str, ranks: int) -> list[int]:
    """Measured bytes of each rank, once bytes and losses are what they should be."""
    reports = pool.run(RankJob(FOUR_BLOCKS, name, rounds=1))
    measured = [report.memory.tensor_bytes for report in reports]
    assert measured == predicted(name, ranks)
    expected = alone()
    assert expected[2] < 0.97 * expected[0], "the weights hardly move"
    assert mean_losses(reports) == pytest.approx(expected, rel=0.01 if name.startswith("half+") else 1e-6)
    return measured


@pytest.mark.parametrize("name", ["pp2+interleaved", "half+pp2+zb", "accumulate8+pp2+zbv"])
def test_two_ranks_hold_what_was_predicted_and_train_as_one_does(name: str, two_ranks: RankPool) -> None:
    compared(two_ranks, name, 2)


def test_what_a_backward_of_weights_waits_for_is_in_memory_until_then(two_ranks: RankPool) -> None:
    plain, split, turned = (compared(two_ranks, f"pp2{schedule}", 2) for schedule in ("", "+zb", "+zbv"))
    assert split[1] > 1.2 * plain[1], "the last rank holds back most of its backwards of weights"
    assert max(turned) < max(split)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["pp2+zb", "tp2+pp2+interleaved", "tp2+pp2+zb", "tp2+pp2+zbv"])
def test_four_ranks_do(name: str) -> None:
    with closing(RankPool(4, "cpu")) as pool:
        compared(pool, name, 4)


def blocks(count: int) -> Workload:
    sizes = BertConfig(16, seq_len=8, layers=count, width=16, heads=2, vocab_size=32, max_positions=8)
    return bert(sizes, REAL, "blocks", 0)


def waiting(schedule: str, ranks: int, rank: int = 0) -> Waiting:
    """Of a pipeline of eight micro-batches on four ranks, of four on two."""
    with fake_world(ranks, rank):
        name = f"pp{ranks}+{schedule}" if schedule else f"pp{ranks}"
        step = distributed_strategy(name).prepare(blocks(2 * ranks), World(ranks, rank, fake=True))
    assert isinstance(step, PipelineStep)
    assert (step.waiting.rank, step.waiting.count) == (rank, 2 * ranks)
    return step.waiting


def idle(schedule: str, ranks: int, rank: int = 0, message_ns: float = 0.0) -> float:
    """Where a forward takes 100 ns in each of two stages, and a backward as long for inputs as for weights."""
    found = waiting(schedule, ranks, rank)
    stages = {stage for order in [found.orders.get(rank, ())] for stage, _, _ in order}
    each = {FORWARD: 100.0, BACKWARD: 200.0} if schedule == "interleaved" else dict.fromkeys("FIW", 100.0)
    took = {(stage, what): found.count * ns for stage in stages for what, ns in each.items()}
    if 0 in stages and schedule != "interleaved":  # which has no inputs that need gradients
        took |= {(0, OF_INPUTS): 0.0, (0, OF_WEIGHTS): found.count * 200.0}
    return found.idle_ns(found.count * 600.0, took, message_ns)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_stages_on_a_rank_halve_what_it_waits_and_split_backwards_leave_less(ranks: int, rank: int) -> None:
    assert idle("", ranks, rank) == pytest.approx((ranks - 1) * 600)
    assert idle("interleaved", ranks, rank) == pytest.approx((ranks - 1) * 300)
    assert 0 <= idle("zb", ranks, rank) < idle("interleaved", ranks, rank)
    assert idle("zbv", ranks, rank) == pytest.approx((ranks - 1) * 100)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slow_messages_are_waited_for_where_nothing_is_left_to_compute(schedule: str) -> None:
    quick, slow = (idle(schedule, 2, message_ns=ns) for ns in (1.0, 100.0))
    assert quick < slow
    sent = sum(what != OF_WEIGHTS for _, what, _ in waiting(schedule, 2).orders[0])
    assert slow - quick < 99 * sent, "a rank computes while some are under way"


def test_a_predicted_step_is_shorter_the_less_its_rank_waits() -> None:
    def small() -> Workload:
        sizes = BertConfig(64, seq_len=64, layers=4, width=128, heads=2, vocab_size=256, max_positions=64)
        return bert(sizes, REAL, "small", 0)

    def ms(name: str) -> float:
        return max(predict_step(distributed_strategy(name), small, 2, rank, find_device("cpu"))[1] for rank in (0, 1))

    plain, interleaved, split = map(ms, ("pp2", "pp2+interleaved", "pp2+zb"))
    assert plain > interleaved > split
