"""What a user's optimizer does, as an update that can be part of the step; or why it cannot.

Taken into the step are `torch.optim.SGD` (with momentum or without), `Adam` and `AdamW`, each group of parameters with
its own numbers. Learning rates may change from step to step. Everything else runs by itself after the step, as in any
loop, on gradients that are then all kept to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from magis.aten.optimizers import OptimizerSpec, ParameterGroup

__all__ = ["fused_rule", "numbers_of", "why_apart", "with_rates"]

_PLAIN = ("dampening", "nesterov", "maximize", "amsgrad", "capturable", "differentiable")
"""Options that the step does not know; they must be off."""
_NUMBERS = ("lr", "momentum", "betas", "eps", "weight_decay", "decoupled_weight_decay")


def why_apart(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
    """Why an optimizer cannot be part of the step, in words; empty if it can."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} is none of SGD, Adam, AdamW"
    groups = optimizer.param_groups
    if len({_kind(optimizer, group) for group in groups}) > 1:
        return "only some of its groups of parameters have momentum, or decay decoupled"
    for group in groups:
        for name in _PLAIN:
            if group.get(name):
                return f"{name} is {group[name]}"
        if any(isinstance(number, torch.Tensor) for number in _flat(numbers_of(group).values())):
            return "one of its numbers is a tensor"
    # frozen ones are passed over, as torch does
    mine = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
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


def fused_rule(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> OptimizerSpec:
    """The update of an optimizer that `why_apart` has nothing against, with its present numbers.

    `trained` are the parameters by the names that they have in the module that is captured.
    """
    first, *others = optimizer.param_groups
    names = {id(parameter): name for name, parameter in trained.items()}
    return OptimizerSpec(
        _kind(optimizer, first),
        **_numbers(first),
        groups=tuple(
            ParameterGroup(tuple(names[id(p)] for p in group["params"] if id(p) in names), **_numbers(group))
            for group in others
        ),
    )


def with_rates(rule: OptimizerSpec, optimizer: Optimizer) -> OptimizerSpec:
    """The rule with the learning rates that the optimizer's groups have now."""
    first, *others = (float(group["lr"]) for group in optimizer.param_groups)
    groups = tuple(replace(group, lr=rate) for group, rate in zip(rule.groups, others, strict=True))
    return replace(rule, lr=first, groups=groups)


def _kind(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    if isinstance(optimizer, SGD):
        return "momentum" if float(group["momentum"]) else "sgd"
    return "adamw" if group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)) else "adam"


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers, as a rule has them."""
    found: dict[str, Any] = {
        name: float(group[name]) for name in ("lr", "momentum", "eps", "weight_decay") if name in group
    }
    if "betas" in group:
        first, second = (float(beta) for beta in group["betas"])
        found["betas"] = (first, second)
    return found


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)
