"""The paper's method as a user asks for it: a case of the gate like any other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magis import run_case
from magis.cases.check import check_case
from magis.models import from_function
from magis.planner.bench import Bench
from magis.results import Case
from tests.training.loops import net

CASE = Case("own", "magis", "cpu", "small", budget=60, timing_rounds=1, search="paper")


def chain() -> tuple[object, ...]:
    torch.manual_seed(0)
    return net(depth=6), (torch.randn(512, 32), torch.randn(512, 32)), nn.functional.mse_loss


def wide() -> tuple[object, ...]:
    """Weight gradients of a wide layer, which the paper's search adds up in parts."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 16), nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)
    return nn.Sequential(*layers), (torch.randn(512, 16), torch.randn(512, 16)), trained_loss


def trained_loss(output: Tensor, target: Tensor) -> Tensor:
    assert output.requires_grad  # wherever it is called: a user's loss may count on it
    return nn.functional.mse_loss(output, target)


@pytest.fixture(scope="module")
def bench() -> Bench:
    """The chain, captured and measured once."""
    return Bench()


@pytest.mark.parametrize("limit", [{"memory_ratio": 0.9}, {"latency_ratio": 1.5}])
def test_a_plan_of_the_papers_method_is_verified_executed_and_compared(bench: Bench, limit: dict[str, Any]) -> None:
    make = from_function("own", chain)
    case = dataclasses.replace(CASE, **limit)
    check_case(case, cache=bench, make=make)
    result = run_case(case, cache=bench, make=make, rough=True)
    assert result.search.feasible
    assert result.numbers == "bit-identical"
    assert result.optimized.measured is not None
    assert result.optimized.measured.peak_bytes == result.optimized.simulated.peak_bytes
    assert result.memory.peak_bytes < result.original_memory.peak_bytes
    assert 1 < result.search.states <= 3 * 60


def test_what_it_runs_in_parts_is_proved_and_computes_eagers_numbers() -> None:
    case = dataclasses.replace(CASE, latency_ratio=1.5, budget=100)
    found = run_case(case, make=from_function("own", wide), rough=True)
    assert found.search.fission.endswith("in 4 parts")
    assert found.numbers == "within tolerance"


def test_a_cap_on_seconds_ends_it(bench: Bench) -> None:
    case = dataclasses.replace(CASE, memory_ratio=0.5, budget=10**6, seconds=1e-6)
    result = run_case(case, cache=bench, make=from_function("own", chain), rough=True)
    assert result.search.stopped_by_seconds
