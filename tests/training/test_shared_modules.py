"""`magis.optimize` on modules that ranks share: the numbers of the plain loop on two real ranks, or one line."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

import pytest
import torch.multiprocessing

from tests.ranks.test_processes import free_port
from tests.training import shared_ranks
from tests.training.shared_ranks import KINDS, RANKS


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, of those kinds that are tested in this run; the workers of pytest-xdist share it."""
    tested = {getattr(item, "callspec", None) and item.callspec.params.get("kind") for item in request.session.items}
    kinds = [kind for kind in KINDS if kind in tested] or [*KINDS][:1]
    base = tmp_path_factory.getbasetemp()
    at = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared_modules"
    done = at / "done"
    try:
        at.mkdir()
    except FileExistsError:
        while not done.exists():
            time.sleep(0.5)
    else:
        try:
            torch.multiprocessing.spawn(shared_ranks.run, (str(at), free_port(), kinds), nprocs=RANKS)
        finally:
            done.touch()
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
    assert sum(measured == planned for measured, planned, _ in peaks) >= len(peaks) // 2


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tensor parallel", "blocks.0.up.weight is a distributed tensor of no fully_shard"),
        ("statistics", "DistributedDataParallel sends the buffers of its module"),
        ("changed", "model.blocks.0.drop.p has changed"),
        ("parted", "some ranks have a batch of a kind that was not planned yet, others have not"),
        ("hooked", "DistributedDataParallel with a communication hook"),
        ("foreign", "the optimizer has none of the parameters that the model trains"),
        ("around", "DistributedDataParallel at '0' of the model"),
        ("one limit", "rank 1 has no step: memory_ratio=2.0"),
        ("two limits", "the limit of rank 1 is another one than that of rank 0"),
        ("no file", "rank 0 has no plan file: cannot read the plan 0.plan"),
        ("other batch", "the step of rank 1 is another one than that of rank 0"),
        ("no plan", "no plan found that needs at most 1.00 KiB"),
        ("branch", "the forward reads numbers off data or draws on the host"),
        ("moved", "the weights of the model have moved in memory"),
    ],
)
def test_what_has_no_plan_is_one_line_on_all_ranks(found: list[dict[str, Any]], what: str, said: str) -> None:
    lines = [of_rank["refusals"][what] for of_rank in found]
    assert lines[0] == lines[1]
    assert said in lines[0]
    assert "\n" not in lines[0].replace("\n  hint: ", "")
