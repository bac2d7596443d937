"""Whatever a loop changes between two steps, the next one computes what eager would."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.optim import SGD, Adam, AdamW, Optimizer, adam, sgd

from magis import UsageError, optimize
from tests.nets import Block
from tests.training.loops import Loops, batch, loss_of, net

ANY: dict[str, Any] = {"memory_ratio": 1.0, "budget": 1}
"""What is planned does not matter here."""
SCALE = 1.0
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Reads a number from everywhere."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body = net(depth=2, dropout=0.1)
        self.unused = nn.Linear(32, 32)
        self.alpha = 1.0
        self.settings = {"beta": [1.0]}
        self.is_long = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x * self.alpha) * self.settings["beta"][0] * SCALE * self.shared
        return self.unused(x) if self.is_long else x


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.share = 1.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_of(output, target) * self.share


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def _attributes(module: Any) -> None:
    module.alpha = 0.5


def _settings(module: Any) -> None:
    module.settings["beta"][0] = 2.0


def _longer(module: Any) -> None:
    module.is_long = True


def _hook(module: Any) -> None:
    module.body[0].register_forward_hook(lambda _module, _inputs, output: output * 0.5)


def _pre_hook(module: Any) -> None:
    module.body[1].register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 0.5,))


def _backward_hook(module: Any) -> None:
    module.body[3].register_full_backward_hook(lambda _module, given, _got: (given[0] * 2,))


def _patch(module: Any) -> None:
    layer = module.body[0]
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)


def _parametrize(module: Any) -> None:
    register_parametrization(module.body[0], "weight", Halved())


def _evaluation(module: Any) -> None:
    module.body[2].eval()


def _overlap(module: Any) -> None:
    module.body[0].weight.data = module.body[3].weight.data


MODULE = (
    _attributes, _settings, _longer, _hook, _pre_hook, _backward_hook, _patch, _parametrize, _evaluation, _overlap,
)  # fmt: skip


@pytest.mark.parametrize("change", MODULE)
def test_a_module_that_changes_is_captured_again(change: Callable[[Any], None]) -> None:
    loops = Loops(Net(), MOMENTUM, **ANY)
    loops.agree(1)
    for module in (loops.module, loops.twin):
        change(module)
    loops.agree(2)


def test_what_is_read_from_classes_and_globals_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = Loops(Net(), MOMENTUM, **ANY)
    loops.agree(1)
    monkeypatch.setattr(Net, "shared", 2.0)
    loops.agree(1)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    loops.agree(1)
    monkeypatch.setattr(nn.Tanh, "forward", lambda _self, x: x.sigmoid())
    loops.agree(1)


def test_hooks_for_all_modules_are_noticed() -> None:
    loops = Loops(Net(), MOMENTUM, **ANY)
    loops.agree(1)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _inputs, output: output * 2 if isinstance(module, nn.Tanh) else None
    )
    loops.agree(1)
    handle.remove()
    loops.agree(1)


def _closure(numbers: list[float]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: loss_of(output, target) * numbers[0]


def test_a_loss_that_changes_is_captured_again() -> None:
    loss = Loss()
    loops = Loops(net(depth=2), MOMENTUM, loss, **ANY)
    loops.agree(1)
    loss.share = 0.3
    loops.agree(1)
    numbers = [1.0]
    loops = Loops(net(depth=2), MOMENTUM, _closure(numbers), **ANY)
    loops.agree(1)
    numbers[0] = 0.3
    loops.agree(1)
    part = partial(nn.functional.smooth_l1_loss, beta=1.0)
    loops = Loops(net(depth=2), MOMENTUM, part, **ANY)
    loops.agree(1)
    part.keywords["beta"] = 0.1
    loops.agree(1)


def test_attributes_that_nothing_reads_need_no_other_plan() -> None:
    loops = Loops(net(depth=2), MOMENTUM, **ANY)
    for epoch in range(3):
        loops.module.epoch = loops.twin.epoch = epoch  # type: ignore[assignment]
        loops.agree(1)
    assert len(loops.step._entries) == 1


def test_what_the_collector_of_garbage_calls_is_no_part_of_the_forward() -> None:
    def by_name(phase: str, _info: object) -> None:
        getattr(gc, phase, None)

    threshold = gc.get_threshold()
    gc.callbacks.append(by_name)
    gc.set_threshold(200)
    try:
        loops = Loops(net(depth=2), MOMENTUM, **ANY)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(by_name)
    loops.module.epoch = loops.twin.epoch = 1  # type: ignore[assignment]
    loops.agree(1)
    assert len(loops.step._entries) == 1


def test_a_module_that_goes_back_and_forth_is_searched_once_in_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = Loops(net(depth=2, dropout=0.1), MOMENTUM, **ANY)
    loops.agree(1)
    for module in (loops.module, loops.twin):
        module.eval()
    loops.agree(1)
    monkeypatch.delattr("magis.frontends.planned.plan")
    for training in (True, False, True):
        for module in (loops.module, loops.twin):
            module.train(training)
        loops.agree(1)


# -- the optimizer ----------------------------------------------------------------------------------------------------


def _option(name: str, value: object) -> Callable[[Optimizer], None]:
    def change(optimizer: Optimizer) -> None:
        optimizer.param_groups[0][name] = value

    return change


def _step_hook(optimizer: Optimizer) -> None:
    def halve(self: Optimizer, _args: object, _kwargs: object) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)


def _patched_step(optimizer: Optimizer) -> None:
    step = optimizer.step

    def twice(*args: Any) -> None:
        step(*args)
        step(*args)

    optimizer.step = twice  # type: ignore[method-assign, assignment]


OPTIMIZER: dict[str, tuple[Any, Callable[[Optimizer], None], str]] = {
    "maximize": (MOMENTUM, _option("maximize", True), "part of"),
    "nesterov": (MOMENTUM, _option("nesterov", True), "part of"),
    "dampening": (MOMENTUM, _option("dampening", 0.5), "part of"),
    "foreach": (MOMENTUM, _option("foreach", True), "part of"),
    "fused": (MOMENTUM, _option("fused", True), "part of"),
    "no momentum": (MOMENTUM, _option("momentum", 0), "part of"),
    "betas": (Adam, _option("betas", (0.5, 0.6)), "part of"),
    "rate": (Adam, _option("lr", torch.tensor(0.1)), "by the optimizer's own code"),
    "hook": (AdamW, _step_hook, "hooks run before or after its step"),
    "patched": (AdamW, _patched_step, "its step is not torch's own"),
}


@pytest.mark.parametrize("name", OPTIMIZER)
def test_an_optimizer_that_changes_updates_as_it_would(name: str) -> None:
    make, change, where = OPTIMIZER[name]
    loops = Loops(net(depth=2), make, **ANY)
    loops.agree(1)
    for optimizer in (loops.optimizer, loops.other):
        change(optimizer)
    loops.agree(2)
    assert where in loops.step.report().update


@pytest.mark.parametrize(
    ("make", "place", "name"),
    [
        (MOMENTUM, SGD, "step"), (MOMENTUM, SGD, "_init_group"), (MOMENTUM, sgd, "sgd"),
        (MOMENTUM, sgd, "_single_tensor_sgd"), (Adam, adam, "_single_tensor_adam"), (AdamW, adam, "adam"),
    ],
)  # fmt: skip
def test_a_part_of_the_step_patched_for_all_is_noticed(
    make: Any, place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = Loops(net(depth=2), make, **ANY)
    loops.agree(1)
    monkeypatch.setattr(place, name, lambda *_, **__: None)
    loops.agree(1)
    assert loops.step.report().update == "part of the step, by the optimizer's own code"


def test_options_that_leave_a_state_short_fail_as_in_eager_mode() -> None:
    loops: Any = Loops(net(depth=2), Adam, **ANY)
    loops.agree(1)
    loops.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        loops.step(*batch())


def test_numbers_that_always_change_are_left_to_the_optimizer() -> None:
    loops: Any = Loops(net(depth=2), Adam, **ANY)
    for number in range(6):
        for optimizer in (loops.optimizer, loops.other):
            optimizer.param_groups[0]["betas"] = (0.8 + number / 100, 0.9)
        loops.agree(1)
    assert "its numbers change from step to step" in loops.step.report().update


def test_groups_and_layers_added_later_are_trained() -> None:
    loops: Any = Loops(net(depth=2), Adam, **ANY)
    loops.agree(2)
    for module, optimizer in ((loops.module, loops.optimizer), (loops.twin, loops.other)):
        torch.manual_seed(3)
        module.append(nn.Linear(32, 32))
        optimizer.add_param_group({"params": list(module[-1].parameters()), "lr": 0.1})
    loops.agree(2)
    assert loops.step.report().update == "part of the step"


@pytest.mark.parametrize("make", [Adam, partial(SGD, lr=0.1, momentum=0.9, dampening=0.5)])
def test_frozen_and_thawed_parameters_have_an_age_of_their_own(make: Any) -> None:
    module = net(depth=3)
    module[0].requires_grad_(False)
    loops: Any = Loops(module, make, **ANY)
    loops.agree(2)
    for each in (loops.module, loops.twin):
        each[0].requires_grad_(True)
        each[2].requires_grad_(False)
    loops.agree(2)
    for each in (loops.module, loops.twin):
        each[2].requires_grad_(True)
    loops.agree(2)
    assert loops.step.report().update == "part of the step"


def test_a_state_that_is_made_anew_starts_at_its_first_step() -> None:
    loops: Any = Loops(net(depth=2), Adam, **ANY)
    assert not loops.optimizer.state  # planning makes none
    loops.agree(2)
    for module, optimizer in ((loops.module, loops.optimizer), (loops.twin, loops.other)):
        del optimizer.state[module.get_submodule("0").weight]
    loops.agree(2)


def test_a_first_momentum_is_the_gradient_to_the_sign_of_zero() -> None:
    def dead(output: Tensor, _target: Tensor) -> Tensor:
        return -(output.relu() * 0).sum()

    loops = Loops(net(depth=1), MOMENTUM, dead, **ANY)
    loops.agree(1)
    for ours, theirs in zip(loops.module.parameters(), loops.twin.parameters(), strict=True):
        buffers = (loops.optimizer.state[ours]["momentum_buffer"], loops.other.state[theirs]["momentum_buffer"])
        assert torch.equal(*(torch.signbit(buffer) for buffer in buffers))


def test_an_optimizer_that_wants_a_closure_is_refused() -> None:
    module = net(depth=2)
    with pytest.raises(UsageError, match=r"LBFGS.step calls the loop's forward.*pass None as the optimizer"):
        optimize(module, batch(), loss_of, torch.optim.LBFGS(module.parameters()), **ANY)


# -- the batch --------------------------------------------------------------------------------------------------------


def _batches() -> dict[str, tuple[Tensor, Tensor]]:
    x, y = batch()
    whole = torch.cat([x, y])
    return {
        "apart": (x, y),
        "one": (x, x),
        "overlap": (whole[:64], whole[32:96]),
        "other overlap": (whole[16:80], whole[:64]),
        "columns": (x.t().contiguous().t(), y),
        "expanded": (x, y[:1].expand(64, 32)),
        "window": (whole[3:67], y),
    }


def test_batches_whose_tensors_overlap_or_are_strided_are_told_apart() -> None:
    given = _batches()
    for first in ("one", "overlap"):
        loops = Loops(net(depth=2), MOMENTUM, example=given[first], **ANY)
        for data in given.values():
            loops.agree_on(*data)
        loops.same()


def test_windows_of_one_data_set_share_a_plan() -> None:
    data = torch.randn(256, 32)
    loops = Loops(net(depth=2), MOMENTUM, example=(data[:64], data[:64]), **ANY)
    for start in (0, 7, 100):
        window = data[start : start + 64]
        loops.agree_on(window, window)
    assert len(loops.step._entries) == 1


def test_a_batch_in_the_memory_of_a_buffer_is_another_kind() -> None:
    def shifted(m: Any, x: Tensor) -> Tensor:
        m.shift.add_(1.0)
        return m.body(x) + m.shift

    loops = Loops(Block(shifted, body=net(depth=2), shift=torch.zeros(64, 32)), MOMENTUM, **ANY)
    loops.agree(1)
    ours, theirs = (each.get_buffer("shift") for each in (loops.module, loops.twin))
    assert torch.equal(loops.step(ours, batch()[1]), loops.eager(theirs, batch()[1]))
    loops.same()


# -- torch ------------------------------------------------------------------------------------------------------------


def test_contexts_in_which_eager_would_not_train_are_refused() -> None:
    module = net(depth=2)
    step = optimize(module, batch(), loss_of, MOMENTUM(module.parameters()), **ANY)
    with torch.no_grad(), pytest.raises(UsageError, match="called without gradients"):
        step(*batch())
    with torch.autograd.graph.save_on_cpu(), pytest.raises(UsageError, match="hooks on saved tensors"):
        step(*batch())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match=r"called under torch.autocast"):
        optimize(module, batch(), loss_of, None, **ANY)


def test_the_default_data_type_is_noticed() -> None:
    data = batch()
    loops = Loops(Block(lambda m, x: m.body(x) * torch.full((), 1 / 3), body=net(depth=2)), MOMENTUM, **ANY)
    loops.agree_on(*data)
    torch.set_default_dtype(torch.float64)
    try:
        loops.agree_on(*data)
    finally:
        torch.set_default_dtype(torch.float32)
    loops.same()
