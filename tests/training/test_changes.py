"""Whatever a loop changes between two steps, the next one computes what eager would."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

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


# -- the batch --------------------------------------------------------------------------------------------------------


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
