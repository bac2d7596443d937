"""Optimizers whose user chose lists or the fused kernel: the step trains as they do, in every bit."""

from __future__ import annotations

from functools import partial

import pytest
from torch.optim import SGD, Adam, AdamW

from magis.capture.optimizer_rule import why_apart
from tests.training.loops import Loops, net

KINDS = {
    "sgd": partial(SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "adam": partial(Adam, lr=1e-2, weight_decay=0.1),
    "adamw": partial(AdamW, lr=1e-2),
}


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("name", KINDS)
def test_the_step_updates_as_its_optimizer_does(name: str, way: str) -> None:
    """A fused kernel rounds otherwise than the loop, and its counters of steps are tensors that it reads."""
    loops = Loops(net(norm=True), partial(KINDS[name], **{way: True}), memory_ratio=0.9)
    assert loops.step.report().update == "part of the step"
    loops.agree(3)
    loops.other.load_state_dict(loops.other.state_dict())
    loops.optimizer.load_state_dict(loops.optimizer.state_dict())
    loops.agree(2)


FORMS = {
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "nesterov decay maximize": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "maximize": partial(SGD, lr=0.1, maximize=True),
    "amsgrad": partial(Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "amsgrad maximize": partial(AdamW, lr=1e-2, amsgrad=True, maximize=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_lists_with_every_option_are_part_of_the_step(name: str) -> None:
    loops = Loops(net(depth=2), partial(FORMS[name], foreach=True), memory_ratio=1.0)
    assert loops.step.report().update == "part of the step"
    loops.agree(3)


def test_groups_that_are_fused_only_in_part_run_by_themselves() -> None:
    module = net(depth=2)
    first, *others = module.parameters()
    optimizer = AdamW([{"params": [first], "fused": True}, {"params": others}])
    assert "fused" in why_apart(optimizer, dict(module.named_parameters()))
