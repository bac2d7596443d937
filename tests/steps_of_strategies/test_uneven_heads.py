"""Heads that ranks do not divide, where attention drops out: what all ranks hold stays alike, and bytes are known."""

from __future__ import annotations

import pytest
import torch

from magis.extensions.ranks import RankJob, RankPool
from magis.ops.generators import drawing_apart
from magis.predict import predict_rank
from magis.strategies import distributed_strategy
from tests.api.cut_nets import dropped_heads

NET = "tests.api.cut_nets:dropped_heads"


def test_ranks_with_more_heads_draw_no_further() -> None:
    with RankPool(2, "cpu") as pool:
        for step in ("unplanned", "planned"):
            pool.run(RankJob(NET, f"tests.steps_of_strategies.replicated:{step}", rounds=1))
        reports = pool.run(RankJob(NET, "tp2", rounds=1))
    predicted = [predict_rank(distributed_strategy("tp2"), dropped_heads, 2, rank).predicted for rank in range(2)]
    assert [each.tensor_bytes for each in predicted if each] == [each.memory.tensor_bytes for each in reports]


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
