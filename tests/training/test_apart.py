"""Optimizers that run by themselves behind the step: numbers, and the bytes that they add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from magis import optimize
from magis.errors import UsageError
from magis.runtime.measure import window_peak
from tests.training.loops import BUDGET, Loops, batch, loss_of, net


class Lion(optim.Optimizer):
    """As papers' code has it: a class of somebody's own."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, (now, later) = self.state[parameter], group["betas"]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                update = state["exp_avg"].mul(now).add_(parameter.grad, alpha=1 - now).sign_()
                parameter.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(parameter.grad, 1 - later)


KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    **{
        kind.__name__: partial(kind, lr=0.01)
        for kind in (optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.Rprop)
    },
    "ASGD": partial(optim.ASGD, lr=0.01),
    "Lion": Lion,
    "RMSprop of all kinds": partial(optim.RMSprop, centered=True, momentum=0.9, weight_decay=0.1),
    "NAdam by lists": partial(optim.NAdam, foreach=True, weight_decay=0.1),
    "Adafactor": optim.Adafactor,
}


def watched(make: Callable[..., optim.Optimizer], params: Any) -> optim.Optimizer:
    """One with a hook, which stays behind the step."""
    made = make(params)
    made.register_step_post_hook(lambda *_given: None)
    return made


def kept_bytes(loops: Loops, data: tuple[Tensor, Tensor]) -> int:
    """What stays; numbers that count steps are the host's."""
    kept = [*loops.twin.parameters(), *data]
    kept += [each for each in _tensors(loops.other.state) if each.dim()]
    return sum(each.nbytes for each in kept)


def _tensors(state: Any) -> list[Tensor]:
    return [each for of_one in state.values() for each in of_one.values() if isinstance(each, Tensor)]


CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [16, 64], ids=["peak in the backward", "peak in the update"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_bytes_are_those_of_a_plain_loop(kind: str, width: int) -> None:
    data = batch(width=width, rows=64 if width == 16 else 2)
    loops = Loops(net(width, 2), partial(watched, KINDS[kind]), example=data, memory_ratio=1.0)
    for seed in range(8):  # some go on in another way than they begin
        some = batch(width=width, rows=len(data[0]), seed=seed)
        assert torch.equal(loops.step(*some), loops.eager(*some))
    loops.same()
    report = loops.step.report()
    assert report.update.startswith("by the optimizer itself, after the step: ")
    loops.other.zero_grad(set_to_none=True)
    stays = kept_bytes(loops, data)
    plain = stays + window_peak(lambda: loops.eager(*data), CPU).peak_bytes
    ours = stays + window_peak(lambda: loops.step(*data), CPU).peak_bytes
    # masks and lists have scratch that hangs on what is in them
    assert 0 <= report.original_bytes - plain <= 64
    assert 0 <= report.planned_bytes - ours <= 64


def test_a_limit_that_its_own_step_exceeds_is_refused() -> None:
    module = net(64, 2)
    with pytest.raises(UsageError, match="no plan found that needs at most"):
        optimize(
            module, batch(2, 64), loss_of, watched(optim.RAdam, module.parameters()), memory_ratio=0.9, budget=BUDGET
        )


def test_nothing_of_the_optimizer_is_changed_to_look_at_it() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    optimizer = optim.RMSprop(module.parameters())
    seen: list[object] = []
    optimizer.register_step_post_hook(lambda *_given: seen.append(1))
    step = optimize(module, batch(8, 4), nn.functional.l1_loss, optimizer, memory_ratio=1.0, budget=BUDGET)
    assert (seen, dict(optimizer.state), module[0].weight.grad) == ([], {}, None)
    step(*batch(8, 4))
    assert len(seen) == 1


def test_a_patched_step_is_not_looked_at() -> None:
    module = net(4, 1)
    optimizer = optim.RMSprop(module.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    step = optimize(module, batch(8, 4), loss_of, optimizer, memory_ratio=1.0, budget=BUDGET)
    assert "not counted" in step.report().update
    scheduled = optim.RMSprop(module.parameters())
    optim.lr_scheduler.StepLR(scheduled, 1)
    step = optimize(module, batch(8, 4), loss_of, scheduled, memory_ratio=1.0, budget=BUDGET)
    assert "not counted" not in step.report().update
