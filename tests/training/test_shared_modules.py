"""`magis.optimize` on modules that ranks share: the numbers of the plain loop on two real ranks, or one line."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch.multiprocessing

from tests.ranks.test_processes import free_port
from tests.training import shared_ranks
from tests.training.shared_ranks import KINDS, RANKS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    at = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(shared_ranks.run, (str(at), free_port()), nprocs=RANKS)
    return [json.loads((at / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", [*KINDS, "clipped"])
def test_planned_steps_have_the_numbers_of_plain_ones(found: list[dict[str, Any]], kind: str) -> None:
    for of_rank in found:
        plain, planned = of_rank[kind]
        assert planned == plain
        assert all(math.isfinite(number) for number in plain if isinstance(number, float))
    assert found[0][kind][0][0] != found[1][kind][0][0], "each rank has a batch of its own"


def test_measured_bytes_are_those_planned(found: list[dict[str, Any]]) -> None:
    """But where gloo's threads hold copies of messages, and for some time behind them."""
    peaks = [peak for of_rank in found for peak in of_rank["peaks"]]
    assert all(0 <= measured - planned <= 4 * sent for measured, planned, sent in peaks)
    assert sum(measured == planned for measured, planned, _ in peaks) > len(KINDS)
