"""After the steps that a technique is given to warm up, its peak is that of all later steps."""

from __future__ import annotations

import pytest

from magis.api import Workload
from magis.models.bert import BertConfig, bert
from magis.models.style import REAL
from magis.predict.rank import fake_rank, rank_peak, warm_steps_of
from magis.strategies.names import DISTRIBUTED, technique

NAMES = (*DISTRIBUTED, *(f"amp+{name}" for name in DISTRIBUTED), "half+ddp", "half+tp", "half+pp")


def small() -> Workload:
    config = BertConfig(8, seq_len=16, layers=2, width=32, heads=4, vocab_size=64, max_positions=16)
    return bert(config, REAL, "small", 0)  # its Adam has state, which the first step makes


def peak(name: str, device: str, steps: int | None) -> tuple[int, int | None]:
    with fake_rank(technique(name), 4, 0, device) as world:
        found = rank_peak(technique(name), small, world, warm_steps=steps, replays=False)
    return found.peak_bytes, None if found.losses == () else len(found.losses)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_one_more_step_changes_nothing(name: str, device: str) -> None:
    given = peak(name, device, None)
    more = peak(name, device, 3)
    assert given[0] == more[0]
    assert given[1] == warm_steps_of(name) + 1


def test_some_need_a_second_step_and_what_nobody_knows_gets_it() -> None:
    assert {name for name in NAMES if warm_steps_of(name) == 2} == {"ddp", "oss", "amp+ddp", "amp+oss", "half+ddp"}
    assert warm_steps_of("package.module:factory") == 2
