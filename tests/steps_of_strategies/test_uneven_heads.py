"""Heads that ranks do not divide, where attention drops out: what all ranks hold stays alike, and bytes are known."""

from __future__ import annotations

import pytest
import torch

from magis.ops.generators import DRAW_STATE, draw_state
from magis.planner.planned_ranks import PlannedRanks
from magis.predict import fake_world, predict_rank
from magis.ranks import RankJob, RankPool
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
    drawn = [graph.values[op.made()[0]].storage for op in graph.ops if op.target == DRAW_STATE]
    assert len(drawn) == len(dropped_heads().blocks)
    assert {(graph.storages[each].kind, graph.storages[each].nbytes) for each in drawn} == {state}


def test_drawn_states_follow_from_the_generator_and_differ() -> None:
    cpu = torch.device("cpu")
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        states = [draw_state(cpu), draw_state(cpu)]
        runs.append(states)
        assert not torch.equal(*states)
        torch.set_rng_state(states[0])
        before = torch.rand(3)
        assert not torch.equal(before, torch.rand(3))
    assert all(torch.equal(*each) for each in zip(*runs, strict=True))
