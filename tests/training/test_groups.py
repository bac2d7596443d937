"""Groups of parameters with numbers of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from magis import UsageError, optimize
from tests.training.loops import Loops, batch, loss_of, net

GROUPS = {
    "sgd": (SGD, {"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5}),
    "adam": (Adam, {"lr": 1e-2, "weight_decay": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-3}),
    "adamw": (AdamW, {"lr": 1e-2}, {"lr": 1e-3, "weight_decay": 0.0}),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_with_numbers_of_their_own_are_part_of_the_step(name: str) -> None:
    kind, all_have, some_have = GROUPS[name]

    def make(params: Any) -> torch.optim.Optimizer:
        few, rest = [], []
        for parameter in params:
            (few if parameter.ndim == 1 else rest).append(parameter)
        return kind([{"params": rest}, {"params": few, **some_have}], **all_have, foreach=False)

    loops = Loops(net(norm=True), make, memory_ratio=0.9)
    assert loops.step.report().update == "part of the step"
    loops.agree(2)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (loops.optimizer, loops.other)]
    for _ in range(2):
        loops.agree(1)
        for schedule in schedules:
            schedule.step()
    loops.optimizer.param_groups[1]["weight_decay"] = loops.other.param_groups[1]["weight_decay"] = 0.3
    loops.agree(2)


def test_groups_of_a_module_that_takes_keywords() -> None:
    """The captured module wraps it: parameters have other names there."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net(depth=2)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.body(x), y)}

    def make(params: Any) -> torch.optim.Optimizer:
        first, *others = params
        return SGD([{"params": [first]}, {"params": others, "lr": 0.5}], lr=0.01, foreach=False)

    data = dict(zip("xy", batch(), strict=True))
    loops = Loops(Named(), make, None, data)
    assert loops.step.report().update == "part of the step"
    for _ in range(2):
        loops.agree_on(**data)
    loops.same()


def test_rates_that_part_ways_need_no_other_plan() -> None:
    loops = Loops(net(), _halves)
    loops.agree(1)
    for optimizer in (loops.optimizer, loops.other):
        optimizer.param_groups[1]["lr"] = 0.5
    loops.agree(2)
    assert loops.step.report().update == "part of the step"
    assert len(loops.step._entries) == 1


def _halves(params: Any) -> torch.optim.Optimizer:
    first, *others = params
    return AdamW([{"params": [first]}, {"params": others}], lr=1e-2, foreach=False)


def test_frozen_parameters_in_the_optimizer_are_passed_over() -> None:
    """As fine-tuning has them: `Adam(model.parameters())` with a frozen backbone."""
    module = net()
    for parameter in module[0].parameters():
        parameter.requires_grad = False
    loops = Loops(module, lambda params: AdamW(params, lr=1e-2, foreach=False), memory_ratio=0.95)
    assert loops.step.report().update == "part of the step"
    loops.agree(3)


def test_an_optimizer_of_another_model_is_refused() -> None:
    module = net()
    with pytest.raises(UsageError, match="the optimizer has none of the parameters that the model trains"):
        optimize(module, batch(), loss_of, AdamW(net().parameters()), memory_ratio=0.95, budget=150)


def test_groups_of_lists_may_name_parameters_without_a_gradient() -> None:
    module = nn.ModuleDict({"body": net(depth=2), "unused": nn.Linear(32, 32)})
    module.forward = module["body"].forward  # type: ignore[method-assign, assignment]
    halves = [{"params": list(module["body"].parameters())}, {"params": list(module["unused"].parameters())}]
    optimizer = AdamW(halves, foreach=True)
    step = optimize(module, batch(), loss_of, optimizer, memory_ratio=1.0, budget=1)
    assert torch.isfinite(step(*batch()))
    assert len(optimizer.state) == 4
