"""Heads that ranks do not divide, where attention drops out: what all ranks hold stays alike, and bytes are known."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from magis.extensions.ranks import RankJob, RankPool
from magis.extensions.ranks.plans.planned_ranks import PlannedRanks
from magis.ops.generators import DRAW_STATE, GET_STATE, drawing_apart
from magis.predict import fake_world, predict_rank
from magis.strategies import World, distributed_strategy
from magis.strategies.single_device import on_fake_tensors
from tests.api.cut_nets import dropped_heads

NET = "tests.api.cut_nets:dropped_heads"


def test_ranks_with_more_heads_draw_no_further() -> None:
    with RankPool(2, "cpu") as pool:
        for step in ("unplanned", "planned"):
            pool.run(RankJob(NET, f"tests.steps_of_strategies.replicated:{step}", rounds=1))
        reports = pool.run(RankJob(NET, "tp2", rounds=1))
    predicted = [predict_rank(distributed_strategy("tp2"), dropped_heads, 2, rank).predicted for rank in range(2)]
    assert [each.tensor_bytes for each in predicted if each] == [each.memory.tensor_bytes for each in reports]


@pytest.mark.parametrize(("device", "state"), [("cpu", ("temporary", 5056)), ("sim:h100", ("host", 16))])
def test_the_state_of_a_gpu_takes_none_of_its_memory(device: str, state: tuple[str, int]) -> None:
    strategy = PlannedRanks("magis+tp2+sp", device=device)
    with fake_world(2, 1):
        work = on_fake_tensors(dropped_heads())[1]
        graph = strategy.subject(strategy.own_part(work, World(2, 1, fake=True))).captured.graph
    drawn = [graph.values[op.made()[0]].storage for op in graph.ops if op.target in (DRAW_STATE, GET_STATE)]
    assert len(drawn) == 2 * len(dropped_heads().blocks)
    assert {(graph.storages[each].kind, graph.storages[each].nbytes) for each in drawn} == {state}


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)])
def test_what_is_drawn_apart_follows_from_the_generator_which_goes_on_alike(device: str) -> None:
    place, runs = torch.device(device), []
    for count in (3, 500, 3):
        torch.manual_seed(7)
        with drawing_apart(place):
            first = torch.rand(count, device=place)
        with drawing_apart(place):
            second = torch.rand(count, device=place)
        runs.append([first[:3], second[:3], torch.rand(3, device=place), torch.rand(3, device=place)])
    assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[2], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(runs[0][2:], runs[1][2:], strict=True))
    assert len({tuple(each.tolist()) for each in runs[0]}) == 4


def test_behind_a_failure_the_generator_goes_on_alike() -> None:
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.rand(3)
    torch.manual_seed(7)
    with suppress(ZeroDivisionError), drawing_apart(torch.device("cpu")):
        torch.rand(5)
        raise ZeroDivisionError
    assert torch.equal(torch.rand(3), expected)
