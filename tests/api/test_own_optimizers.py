"""Cases whose optimizer runs by itself behind the step: numbers, bytes, limits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from magis.capture.workload import Workload
from magis.cases.run_case import run_case
from magis.models import from_function
from magis.results import Case, CaseResult

Made = Callable[[list[nn.Parameter]], optim.Optimizer]


class Lion(optim.Optimizer):
    """A class of somebody's own."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                self.move(parameter, state, group["lr"])

    def move(self, parameter: Tensor, state: dict[str, Any], rate: float) -> None:
        assert parameter.grad is not None
        update = state["exp_avg"].mul(0.9).add_(parameter.grad, alpha=0.1).sign_()
        parameter.add_(update, alpha=-rate)
        state["exp_avg"].lerp_(parameter.grad, 0.01)


class Meddling(Lion):
    """Writes over gradients, counts in Python, draws."""

    def move(self, parameter: Tensor, state: dict[str, Any], rate: float) -> None:
        assert parameter.grad is not None
        state["steps"] = state.get("steps", 0) + 1
        parameter.grad.mul_(0.5).add_(torch.randn_like(parameter), alpha=1e-3)
        parameter.sub_(state["exp_avg"].add_(parameter.grad) * torch.tensor(rate / state["steps"]))


def in_groups(weights: list[nn.Parameter]) -> optim.Optimizer:
    return optim.RMSprop([{"params": weights[:2], "lr": 0.1}, {"params": weights[2:], "momentum": 0.9}], lr=1e-3)


def warm(weights: list[nn.Parameter]) -> optim.Optimizer:
    """One that has gone a step already."""
    made = optim.RMSprop(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    made.step()
    return made


def scheduled(weights: list[nn.Parameter]) -> optim.Optimizer:
    made = optim.Adagrad(weights)
    optim.lr_scheduler.StepLR(made, 1)
    return made


def maker(made: Made, rows: int = 256, width: int = 32) -> Callable[[int], Workload]:
    def network() -> object:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 4))
        optimizer = made(list(module.parameters()))
        return module, (torch.randn(rows, width), torch.randint(4, (rows,))), nn.functional.cross_entropy, optimizer

    return from_function("net", network, None)


def result_of(make: Callable[[int], Workload], ratio: float = 0.9, **more: Any) -> CaseResult:
    given = {"strategy": "magis", "device": "cpu", "memory_ratio": ratio, "budget": 60, "timing_rounds": 1, **more}
    return run_case(Case(model="net", preset="small", **given), make=make, rough=True)


@pytest.mark.parametrize(
    "made",
    [
        *(optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam, Lion, Meddling),
        *(in_groups, warm, scheduled),
        lambda weights: optim.RMSprop(weights[:3]),
        lambda weights: optim.Adam([*weights, nn.Parameter(torch.ones(3))]),
        lambda weights: optim.Adadelta(weights, foreach=True, weight_decay=0.1),
    ],
)
def test_numbers_are_eagers_and_bytes_are_exact(made: Made) -> None:
    result = result_of(maker(made))
    assert result.numbers == "bit-identical"
    assert result.original.measured == result.original.simulated
    assert result.optimized.measured == result.optimized.simulated
    assert result.note == ""
    assert result.optimized.simulated.peak_bytes < result.original.simulated.peak_bytes


def test_its_state_stays_and_its_step_bounds_every_plan() -> None:
    result = result_of(maker(optim.RAdam, rows=2), ratio=0.5)
    assert result.persistent_bytes == 3 * result.weight_bytes + 2 * (32 * 4 + 8)  # two moments; the batch
    peak = result.original.simulated.peak_bytes
    assert not result.search.feasible
    assert (result.lower_bound_bytes, result.optimized.simulated.peak_bytes) == (peak, peak)
    assert "optimizer state" in result.bound
    assert "that RAdam.step (update) needs whole: " in result.bound
    held = result.original.at_peak
    assert held is not None
    assert {"state", "gradient", "update"} <= {row.kind for row in held.held}


def test_parts_in_loops_are_within_tolerance() -> None:
    result = result_of(maker(Meddling, rows=4096), ratio=0.3)
    assert (bool(result.search.fission), result.numbers) == (True, "within tolerance")
    assert result.optimized.measured == result.optimized.simulated


def test_simulated_devices_update_by_lists_where_that_is_known() -> None:
    loop = result_of(maker(lambda weights: optim.RMSprop(weights, foreach=False)), device="sim:h200")
    lists = result_of(maker(optim.RMSprop), device="sim:h200")
    assert lists.lower_bound_bytes > loop.lower_bound_bytes
    assert (loop.note, lists.note) == ("", "")
    assert loop.original.simulated_ms > lists.original.simulated_ms
    own = result_of(maker(Lion), device="sim:h200")
    assert own.note == "Lion.step is simulated as its code runs on a CPU"
