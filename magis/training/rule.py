"""What a user's optimizer does, as an update that can be part of the step; or why it cannot.

Taken into the step are `torch.optim.SGD` (with momentum or without), `Adam` and `AdamW` with one set of numbers for all
parameters. The learning rate may change from step to step. Everything else runs by itself after the step, as in any
loop, on gradients that are then all kept to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from magis.capture import OptimizerSpec

__all__ = ["fused_rule", "numbers_of", "why_apart"]

_PLAIN = ("dampening", "nesterov", "maximize", "amsgrad", "capturable", "differentiable")
"""Options that the step does not know; they must be off."""
_NUMBERS = ("lr", "momentum", "betas", "eps", "weight_decay", "decoupled_weight_decay")


def why_apart(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
    """Why an optimizer cannot be part of the step, in words; empty if it can."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} is none of SGD, Adam, AdamW"
    groups = optimizer.param_groups
    if len({repr(sorted(numbers_of(group).items())) for group in groups}) > 1:
        return f"its {len(groups)} groups of parameters have different numbers"
    for name in _PLAIN:
        if groups[0].get(name):
            return f"{name} is {groups[0][name]}"
    if any(isinstance(number, torch.Tensor) for number in _flat(numbers_of(groups[0]).values())):
        return "one of its numbers is a tensor"
    mine = {id(parameter) for group in groups for parameter in group["params"]}
    theirs = {id(parameter) for parameter in trained.values()}
    if mine != theirs:
        only = "some that the model does not train" if mine - theirs else "not all that the model trains"
        return f"its parameters are {only}"
    hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    if any(hooks):
        return "hooks run before or after its step"
    return ""


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group of parameters, as they are now."""
    return {name: group[name] for name in _NUMBERS if name in group}


def fused_rule(optimizer: Optimizer) -> OptimizerSpec:
    """The update of an optimizer that `why_apart` has nothing against, with its present numbers."""
    numbers = numbers_of(optimizer.param_groups[0])
    lr, decay = float(numbers["lr"]), float(numbers["weight_decay"])
    if isinstance(optimizer, SGD):
        momentum = float(numbers["momentum"])
        return OptimizerSpec("momentum" if momentum else "sgd", lr=lr, momentum=momentum, weight_decay=decay)
    decoupled = bool(numbers.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
    first, second = (float(beta) for beta in numbers["betas"])
    kind = "adamw" if decoupled else "adam"
    return OptimizerSpec(kind, lr=lr, betas=(first, second), eps=float(numbers["eps"]), weight_decay=decay)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)
