"""After the steps that a strategy is given to warm up, its peak is that of all later steps."""

from __future__ import annotations

import pytest

from magis.capture.workload import Workload
from magis.extensions.models.building import REAL
from magis.extensions.models.encoders import BertConfig, bert
from magis.extensions.ranks.prediction.rank_memory import fake_rank, rank_peak, warm_steps_of
from magis.strategies.distributed_names import DISTRIBUTED, distributed_strategy
from magis.strategies.rank_step import World

NAMES = (*DISTRIBUTED, *(f"amp+{name}" for name in DISTRIBUTED), "half+ddp", "half+tp", "half+pp", "half+pp+zb")


def small() -> Workload:
    config = BertConfig(8, seq_len=16, layers=4, width=32, heads=4, vocab_size=64, max_positions=16)
    return bert(config, REAL, "small", 0)  # its Adam has state, which the first step makes


def peak(name: str, device: str, steps: int | None) -> tuple[int, int]:
    """Bytes, and how many steps there were."""
    with fake_rank(distributed_strategy(name), 4, 0, device) as world:
        found = rank_peak(distributed_strategy(name), small, world, warm_steps=steps)
    return found.peak_bytes, len(found.losses)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_one_more_step_changes_nothing(name: str, device: str) -> None:
    given, steps = peak(name, device, None)
    more, _ = peak(name, device, 3)
    assert given == more
    assert steps == warm_steps_of(distributed_strategy(name), World()) + 1


def test_some_need_a_second_step_and_what_nobody_knows_gets_it() -> None:
    again = {name for name in NAMES if warm_steps_of(distributed_strategy(name), World()) == 2}
    assert again == {"ddp", "oss", "amp+ddp", "amp+oss", "half+ddp"}
    assert warm_steps_of(distributed_strategy("tests.ranks.own_strategies:groups_of_four"), World()) == 2
    assert warm_steps_of(distributed_strategy("zero1"), World(device="cuda")) == 1
    assert warm_steps_of(distributed_strategy("amp+zero1"), World(device="cuda")) > 3, "the first updates are skipped"
    assert warm_steps_of(distributed_strategy("amp+zero1"), World(device="cuda", fake=True)) == 1
