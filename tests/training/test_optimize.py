"""magis.optimize: the caller's own module and optimizer, trained as their loop would, bit for bit, in less memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from magis import CaptureError, UsageError, optimize, peak
from magis.frontends import kept_steps
from magis.frontends.optimized_step import BY_ITS_CODE
from magis.runtime.measure import window_peak
from tests.nets import Block
from tests.training.loops import BUDGET, Loops, assert_same, batch, loss_of, net

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(Adam, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw": partial(AdamW, lr=1e-2, eps=1e-5),
    "dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, maximize=True),
    "amsgrad": partial(Adam, lr=1e-2, weight_decay=0.1, amsgrad=True, maximize=True),
}
plain = partial(AdamW, lr=1e-2, foreach=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_trains_as_in_eager_mode(name: str) -> None:
    loops = Loops(net(dropout=0.1, norm=True), partial(OPTIMIZERS[name], foreach=False), memory_ratio=0.8)
    assert loops.step.report().update == "part of the step"
    assert loops.step.report().memory_ratio <= 0.8
    loops.agree(4)


def test_less_memory_is_really_used() -> None:
    loops = Loops(net(64, 8), partial(SGD, lr=0.1), example=batch(512, 64), memory_ratio=0.6)
    data = batch(512, 64)
    for _ in range(2):
        loops.step(*data)
        loops.eager(*data)
    loops.other.zero_grad()
    persistent = 4 * (sum(p.numel() for p in loops.module.parameters()) + sum(t.numel() for t in data))
    ours = window_peak(lambda: loops.step(*data)).peak_bytes + persistent
    theirs = window_peak(lambda: loops.eager(*data)).peak_bytes + persistent
    report = loops.step.report()
    assert theirs == report.original_bytes
    assert ours == report.planned_bytes <= 0.6 * theirs
    with peak("cpu") as seen:
        loops.step(*data)
    assert seen.allocated_bytes == ours - persistent


def test_learning_rates_may_change_at_every_step() -> None:
    loops = Loops(net(), plain)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 5) for each in (loops.optimizer, loops.other)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        for _ in range(4):
            loops.agree(1)
            for schedule in schedules:
                schedule.step()
    loops.agree(1)


def test_states_are_saved_and_loaded_as_ever() -> None:
    loops = Loops(net(), plain)
    loops.agree(2)
    for module, optimizer in ((loops.module, loops.optimizer), (loops.twin, loops.other)):
        kept = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        for parameter in module.parameters():
            parameter.data.zero_()
        module.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])  # puts new tensors in the place of those that the step was bound to
    loops.agree(2)


def one_eager(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    inputs, targets = batch(seed=seed)
    loss_of(module(inputs), targets).backward()
    optimizer.step()


def test_training_goes_on_where_eager_left_off() -> None:
    """Moments and counters that the optimizer has already are taken over."""
    module = net()
    optimizer = plain(module.parameters())
    for seed in range(3):
        one_eager(module, optimizer, seed)

    def make(params: Any) -> torch.optim.Optimizer:
        made = plain(params)
        made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return made

    loops = Loops(module, make)
    loops.agree(2)
    # and eager goes on where the step left off
    for seed in range(2):
        one_eager(module, loops.optimizer, seed)
        loops.eager(*batch(seed=seed))
    loops.optimizer.zero_grad()
    loops.other.zero_grad()
    loops.same()


def test_without_an_optimizer_gradients_are_left_for_clipping_and_accumulation() -> None:
    loops = Loops(net(), None, memory_ratio=0.9)
    assert loops.step.report().update == "left to the caller"
    twins = loops.module, loops.twin
    updaters = [RMSprop(each.parameters(), lr=1e-3) for each in twins]
    for _ in range(2):
        loops.agree(3)  # gradients of all steps are summed up
        assert torch.equal(*(nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in twins))
        for updater in updaters:
            updater.step()
            updater.zero_grad()
    loops.same()


@pytest.mark.parametrize("make", [Adam, AdamW, partial(SGD, momentum=0.9)])
def test_fused_updates_are_part_of_the_step(make: Any) -> None:
    loops = Loops(net(), lambda params: make(params, lr=1e-2, fused=True), memory_ratio=0.95)
    assert loops.step.report().update == "part of the step"
    loops.agree(3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: RMSprop(params, lr=1e-3), BY_ITS_CODE),
        (lambda params: SGD(_two_momenta(list(params)), lr=0.1), BY_ITS_CODE),
        (lambda params: AdamW(params, lr=torch.tensor(1e-3)), BY_ITS_CODE),
        (
            lambda params: SGD(list(params)[:2], lr=0.1),
            "by the optimizer itself, after the step: its parameters are not all that the model trains",
        ),
    ],
)
def test_other_optimizers_run_by_their_own_code(make: Any, reason: str) -> None:
    loops = Loops(net(), make, memory_ratio=0.95)
    assert loops.step.report().update.startswith(reason)
    loops.agree(3)
    assert all(parameter.grad is None for group in loops.optimizer.param_groups for parameter in group["params"])


def _two_momenta(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:3], "momentum": 0.0}, {"params": params[3:], "momentum": 0.9}]


def test_batches_of_other_shapes_are_planned_when_they_come_and_some_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_steps, "KINDS", 4)
    loops = Loops(net(), plain, memory_ratio=0.9)
    first = loops.step.report()
    loops.agree(1, rows=48)
    assert loops.step.report().original_bytes < first.original_bytes
    for rows in range(16, 48, 8):
        loops.agree(1, rows=rows)
    assert len(loops.step._entries) == 4
    loops.agree(1, rows=64)


def test_modes_and_frozen_layers_are_noticed() -> None:
    loops = Loops(net(dropout=0.5, norm=True), plain, memory_ratio=0.9)
    loops.agree(1)
    for module in (loops.module, loops.twin):
        module.eval()
    loops.agree(1)
    for module in (loops.module, loops.twin):
        module.train()
        module.get_submodule("0").requires_grad_(False)
    loops.agree(2)  # the optimizer passes frozen parameters over, in the step as in torch
    assert loops.step.report().update == "part of the step"


def test_replaced_parameters_and_layers_are_noticed() -> None:
    module = net()
    step = optimize(module, batch(), loss_of, None, memory_ratio=0.9, budget=BUDGET)
    step(*batch())
    first = module.get_submodule("0")
    first.weight = nn.Parameter(torch.eye(32))
    module[2] = nn.Linear(32, 32, bias=False)
    twin = copy.deepcopy(module)
    twin.zero_grad()
    module.zero_grad()
    loss_of(twin(batch()[0]), batch()[1]).backward()
    step(*batch())
    assert_same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])
    module.append(nn.ReLU())
    assert torch.equal(step(*batch()), loss_of(module(batch()[0]), batch()[1]).detach())


def test_attributes_that_change_are_noticed() -> None:
    """The probability of a dropout is a constant of a captured step; a schedule for it must not be lost."""
    loops = Loops(net(dropout=0.1), plain, memory_ratio=0.99)
    loops.agree(1)
    for module in (loops.module, loops.twin):
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.7
    loops.agree(2)


class Keywords(nn.Module):
    """As models of transformers: keywords in, an object with the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.body = net()
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.body(self.embed(ids)))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def test_a_batch_of_keywords_and_a_loss_of_the_models_own() -> None:
    data = {"ids": torch.randint(0, 50, (8, 12)), "labels": torch.randint(0, 50, (8, 12))}
    loops = Loops(Keywords(), plain, None, data)
    for _ in range(3):
        loops.agree_on(**data)
    loops.same()
    assert torch.equal(loops.step(data), loops.eager(**data))  # as one dictionary, too


def test_several_inputs_and_targets() -> None:
    def loss(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return ((output - target).abs() * weight).mean()

    (x, y), (z, w) = batch(), batch(seed=5)
    two = Block(lambda m, left, right: m.body(left + right), body=net())
    loops = Loops(two, plain, loss, ((x, z), (y, w)))
    for _ in range(2):
        loops.agree_on((x, z), (y, w))
    loops.same()


def test_autocast_takes_the_place_of_its_context() -> None:
    data = batch(width=64)
    loops = Loops(net(64), plain, example=data, autocast=torch.bfloat16)
    for _ in range(2):
        loops.agree_on(*data)
    loops.same()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match=r"called under torch.autocast"):
        loops.step(*data)


def test_a_step_in_parts_trains_as_well_but_for_rounding() -> None:
    module = net(32, 4)
    twin = copy.deepcopy(module).double()
    step = optimize(module, batch(256), loss_of, None, memory_ratio=0.55, budget=BUDGET)
    assert step.report().fission
    inputs, targets = batch(256, seed=3)
    loss = loss_of(twin(inputs.double()), targets.double())
    loss.backward()
    assert torch.allclose(step(inputs, targets).double(), loss.detach(), rtol=1e-6)
    for ours, exact in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert exact.grad is not None
        assert (ours.grad.double() - exact.grad).abs().max() <= 1e-5 * exact.grad.abs().max()


def test_a_latency_limit_and_one_in_bytes() -> None:
    module = net(64, 8)
    data = batch(512, 64)
    fast = optimize(module, data, loss_of, None, latency_ratio=1.2, budget=BUDGET).report()
    assert fast.latency_ratio <= 1.2
    assert fast.memory_ratio < 1
    lean = optimize(module, data, loss_of, None, memory_limit="2 MiB", budget=BUDGET).report()
    assert lean.planned_bytes <= lean.limit_bytes == 2**21
    assert "peak memory" in str(lean)


def test_limits_that_cannot_be_kept_name_what_can() -> None:
    with pytest.raises(UsageError, match=r"no plan found that needs at most 100.00 KiB: .* raise the limit"):
        optimize(net(64, 8), batch(512, 64), loss_of, None, memory_limit="100 KiB", budget=BUDGET)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one limit is needed, not none; give one of memory_ratio, memory_limit, latency_ratio"),
        ({"memory_ratio": 0.5, "latency_ratio": 1.1}, "one limit is needed, not memory_ratio and latency_ratio"),
        ({"memory_ratio": 0.0}, "memory_ratio=0.0"),
        ({"memory_ratio": float("nan")}, "memory_ratio=nan"),
        ({"memory_ratio": True}, "memory_ratio=True"),
        ({"latency_ratio": 0.9}, "latency_ratio=0.9"),
        ({"memory_limit": "8 G"}, "not an amount of memory: '8 G'"),
        ({"memory_limit": -1}, "memory_limit=-1"),
        ({"memory_limit": 1.5}, "memory_limit=1.5"),
        ({"memory_ratio": 0.5, "budget": 0}, "budget=0"),
        ({"memory_ratio": 0.5, "slack": 1}, "slack=1; use a share from 0 to 0.9"),
        ({"memory_ratio": 0.5, "seconds": "x"}, "seconds='x'"),
        ({"memory_ratio": 0.5, "device": "cuda"}, "device='cuda', but the model lies on 'cpu'"),
        ({"memory_ratio": 0.5, "autocast": torch.float64}, "autocast to torch.float64; use torch.bfloat16"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        optimize(net(), batch(), loss_of, None, **arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones(3), "a batch of a Tensor; pass (inputs, targets)"),
        ((torch.ones(3),), "a batch of 1 values"),
        ((torch.ones(3), object()), "targets hold a object, which is no tensor, number, text or container"),
        ((torch.ones(3, requires_grad=True), torch.ones(3)), "requires a gradient; detach it"),
    ],
)
def test_batches_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        optimize(net(), given, loss_of, None, memory_ratio=0.8)
    assert message in str(error.value)


def test_steps_that_cannot_be_captured_are_refused_with_the_line() -> None:
    reading = Block(lambda m, x: m.body(x) * x.sum().item(), body=net())
    with pytest.raises(CaptureError, match=r"test_optimize\.py"):
        optimize(reading, batch(), loss_of, None, memory_ratio=0.8)


def test_layers_that_nothing_uses_stay_without_a_state() -> None:
    loops = Loops(Block(lambda m, x: m.body(x), body=net(), extra=nn.Linear(32, 32)), plain)
    loops.agree(2)
    assert len(loops.optimizer.state_dict()["state"]) == 8


def test_hooks_that_come_later_are_refused_too() -> None:
    module = net()
    step = optimize(module, batch(), loss_of, None, memory_ratio=0.95, budget=BUDGET)
    step(*batch())
    handle = module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UsageError, match=r"0.weight has a hook on its gradient"):
        step(*batch())
    handle.remove()
    step(*batch())


def test_hooks_on_gradients_are_refused() -> None:
    module = net()
    module[0].weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(UsageError, match=r"0.weight has a hook on its gradient"):
        optimize(module, batch(), loss_of, None, memory_ratio=0.8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"module": nn.Linear}, "the model is the class Linear; call it: Linear()"),
        (
            {"module": torch.tanh},
            (
                "magis.optimize: a builtin_function_or_method brings its own batch and loss; "
                "leave these out, or give a torch.nn.Module"
            ),
        ),
        (
            {"module": nn.LazyLinear(3)},
            "parameter weight is lazy, and has no shape yet; call the model once on a batch",
        ),
        ({"loss": nn.MSELoss}, "the loss function is the class MSELoss; call it: MSELoss()"),
        ({"loss": 3}, "the loss function is of type int; give a function, or None"),
        ({"optimizer": SGD}, "the optimizer is the class SGD; call it: SGD(model.parameters())"),
        ({"optimizer": 3}, "the optimizer is of type int; give a torch.optim.Optimizer, or None"),
        ({"plan": 3}, "the plan is of type int; give the path of a saved plan"),
    ],
)
def test_what_is_no_part_of_a_step_is_one_line(wrong: dict[str, Any], said: str) -> None:
    model = nn.Linear(3, 3)
    parts = {"module": model, "loss": nn.functional.mse_loss, "optimizer": SGD(model.parameters(), lr=0.1)} | wrong
    with pytest.raises(UsageError) as error:
        optimize(**parts, batch=(torch.ones(2, 3), torch.ones(2, 3)), memory_ratio=1.0)  # type: ignore[arg-type]
    assert str(error.value) == said


def test_a_scheduler_is_no_optimizer_and_a_step_is_no_copy() -> None:
    model, batch = nn.Linear(3, 3), (torch.ones(2, 3), torch.ones(2, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UsageError, match="of type StepLR; give the optimizer that it drives"):
        optimize(model, batch, nn.functional.mse_loss, scheduler, memory_ratio=1.0)
    step = optimize(model, batch, nn.functional.mse_loss, optimizer, memory_ratio=1.0, budget=1)
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copied(step)
    with pytest.raises(UsageError, match="inputs hold a tensor that is sparse_coo"):
        step(batch[0].to_sparse(), batch[1])


def test_a_step_runs_and_is_planned_while_a_peak_is_measured() -> None:
    model, batch = nn.Linear(3, 3), (torch.ones(2, 3), torch.ones(2, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    step = optimize(model, batch, nn.functional.mse_loss, optimizer, memory_ratio=1.0, budget=1)
    expected = nn.functional.mse_loss(model(batch[0]), batch[1]).detach()
    with peak() as measured:
        assert torch.equal(step(*batch), expected)
        optimize(model, batch, nn.functional.mse_loss, optimizer, memory_ratio=1.0, budget=1)
    assert measured.tensor_bytes > 0


def test_a_loss_that_is_no_tensor_is_one_line() -> None:
    model, batch = nn.Linear(3, 3), (torch.ones(2, 3), torch.ones(2, 3))
    loss_fn: Any = lambda _out, _target: 3.0  # noqa: E731
    with pytest.raises(CaptureError, match=r"^the loss is not a single number but of type float; "):
        optimize(model, batch, loss_fn, None, memory_ratio=1.0, budget=1)
