"""The strategy "magis+compile": its name, its limits, and that nothing combines with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from magis.errors import UsageError
from magis.models.building import REAL
from magis.models.convnets import MlpConfig, mlp
from magis.strategies.single_device import local
from magis.strategies.strategy_names import LISTED, PLANNED_CODE, PLANS, family, is_local
from pytest_magis.strategies import Magis, by_name


def test_the_name_is_one_of_a_local_technique_with_limits() -> None:
    assert PLANNED_CODE not in LISTED, "all would compile each model once more for every limit"
    assert PLANNED_CODE not in PLANS
    assert is_local(PLANNED_CODE)
    assert family(PLANNED_CODE) == "local"
    assert isinstance(by_name(PLANNED_CODE), Magis)  # one case for each limit
    technique = local(PLANNED_CODE, "cpu", memory_ratio=0.6)
    assert not technique.is_captured
    assert not technique.keeps_numbers
    assert technique.limits == (("memory_ratio", 0.6),)
    assert local(PLANNED_CODE, "cpu", latency_ratio=1.1).limits == (("latency_ratio", 1.1),)
    assert local("compile", "cpu", memory_ratio=0.6).limits == ()


@pytest.mark.parametrize("name", ["amp+magis+compile", "magis+compile+checkpoint", "magis+compile-budget"])
def test_nothing_combines_with_it(name: str) -> None:
    assert family(name) is None
    with pytest.raises(UsageError, match="unknown part 'magis'"):
        local(name, "cpu")


def test_its_step_asks_for_the_backend_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compile_(call: Callable[[], Any], **settings: Any) -> Callable[[], Any]:
        asked.append(settings)
        return call

    monkeypatch.setattr(torch, "compile", compile_)
    work = mlp(MlpConfig(batch_size=8, inputs=4, hidden=8, layers=3, classes=4), REAL, "mlp", 0)
    step = local(PLANNED_CODE, "cpu", memory_ratio=0.6).step(work)
    step.prepare()
    assert step.run().isfinite()
    assert asked == [{"backend": "magis", "options": {"inductor": True, "memory_ratio": 0.6}}]
