"""What a user's optimizer does, as an update that can be part of the step; or why it cannot.

Taken into the step are `torch.optim.SGD`, `Adam` and `AdamW` as torch made them, each group of parameters with its own
numbers, parameters of different age too. Learning rates may change from step to step. Everything else runs by itself
after the step, as in any loop, on gradients that are then all kept to the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as global_hooks

from magis.aten.optimizers import OptimizerSpec, ParameterGroup, state_names

__all__ = [
    "Update",
    "age_of",
    "fingerprint",
    "fused_rule",
    "has_hooks",
    "needs_closure",
    "update_of",
    "why_apart",
    "with_rates",
]

_OFF = ("capturable", "differentiable")
"""Options with numbers that the step does not compute."""
_NOT_FUSED = ("dampening", "nesterov", "maximize", "amsgrad")
"""Options that the step takes only of updates that are not fused."""
_NUMBERS = ("lr", "momentum", "betas", "eps", "weight_decay", "dampening")
_FLAGS = ("nesterov", "maximize")
_METHODS = ("step", "zero_grad")


@dataclass(frozen=True)
class Update:
    """The update of an optimizer as it is now."""

    spec: OptimizerSpec
    homes: tuple[int, ...]
    """For each rule in `spec.alone()`, the number of the optimizer's group that it is (a part of)."""

    @property
    def frozen_in(self) -> OptimizerSpec:
        """What of it a plan has as constants: all but the learning rates."""
        return replace(self.spec, lr=0.0, groups=tuple(replace(group, lr=0.0) for group in self.spec.groups))


def why_apart(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
    """Why an optimizer cannot be part of the step, in words; empty if it can."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} is none of SGD, Adam, AdamW"
    for name in _METHODS:
        if not _is_torchs_own(getattr(optimizer, name)):
            return f"its {name} is not torch's own"
    groups = optimizer.param_groups
    if (
        len({(_kind(optimizer, group), *(bool(group.get(name)) for name in ("amsgrad", "fused"))) for group in groups})
        > 1
    ):
        return "only some of its groups of parameters have momentum, amsgrad, or decay decoupled, or are fused"
    for group in groups:
        for name in _OFF:
            if group.get(name):
                return f"{name} is {group[name]}"
        for name in ("foreach", *_NOT_FUSED) if group.get("fused") else ():
            if group.get(name):
                return f"it is fused, and {name} is {group[name]}"
        if not all(type(number) in (int, float) for number in _flat(group[name] for name in _NUMBERS if name in group)):
            return "one of its numbers is a tensor"
        if len({*map(id, group["params"])}) < len(group["params"]):
            return "a group has a parameter twice"
    # frozen ones are passed over, as torch does
    mine = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
    theirs = {id(parameter) for parameter in trained.values()}
    if mine != theirs:
        only = "some that the model does not train" if mine - theirs else "not all that the model trains"
        return f"its parameters are {only}"
    if has_hooks(optimizer):
        return "hooks run before or after its step"
    return _odd_state(optimizer, trained)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its step calls the loop's forward and backward itself, as often as it likes."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def fused_rule(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> OptimizerSpec:
    """The update of an optimizer that `why_apart` has nothing against, with its present numbers, all parameters at the
    same age. `trained` are the parameters by the names that they have in the module that is captured."""
    return _update(optimizer, trained, by_age=False).spec


def update_of(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> Update:
    """The same, with parameters of different age (their bias corrections differ) in groups of their own."""
    return _update(optimizer, trained, by_age=True)


def age_of(optimizer: Optimizer, parameter: nn.Parameter) -> int:
    """How many steps a parameter has gone, where its next one depends on that."""
    state = optimizer.state.get(parameter, {})
    if isinstance(optimizer, SGD):
        return int(state.get("momentum_buffer") is not None)
    return int(state.get("step", 0))


def with_rates(update: Update, optimizer: Optimizer) -> OptimizerSpec:
    """The rule with the learning rates that the optimizer's groups have now."""
    first, *others = (float(optimizer.param_groups[home]["lr"]) for home in update.homes)
    groups = tuple(replace(group, lr=rate) for group, rate in zip(update.spec.groups, others, strict=True))
    return replace(update.spec, lr=first, groups=groups)


def fingerprint(optimizer: Optimizer) -> tuple[Any, ...]:
    """All that `why_apart` and `update_of` look at, but for the state and the values of learning rates."""
    kind, own = type(optimizer), vars(optimizer)
    return (
        kind,
        *(getattr(kind, name) for name in _METHODS),
        *(own.get(name) for name in _METHODS),
        *map(bool, _hooks(optimizer)),
        *(_of_group(group) for group in optimizer.param_groups),
    )


def _of_group(group: Mapping[str, Any]) -> tuple[Any, ...]:
    numbers = tuple(
        (name, type(value) if name == "lr" else value if type(value) in (int, float, bool, tuple) else id(value))
        for name, value in group.items()
        if name != "params"
    )
    return numbers, [(id(parameter), parameter.requires_grad) for parameter in group["params"]]


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether anything else runs before or after its step."""
    return any(_hooks(optimizer))


def _hooks(optimizer: Optimizer) -> tuple[Any, ...]:
    return (
        getattr(optimizer, "_optimizer_step_pre_hooks", None),
        getattr(optimizer, "_optimizer_step_post_hooks", None),
        global_hooks._global_optimizer_pre_hooks,
        global_hooks._global_optimizer_post_hooks,
    )


def _is_torchs_own(method: Any) -> bool:
    """Whether a method is torch's, under whatever torch wraps around it (profiling, learning-rate schedulers)."""
    while method is not None:
        function = getattr(method, "__func__", method)
        code = getattr(function, "__code__", None)
        if code is None or not str(function.__globals__.get("__name__", "")).startswith("torch."):
            return False
        method = getattr(function, "__wrapped__", None)
    return True


def _odd_state(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
    """What of the state is not as the first step of such an optimizer makes it: an option was set later, say."""
    kinds = state_names(fused_rule(optimizer, trained))
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter)
        if not state:
            continue
        for kind in [kind for kind in kinds if kind != "step"]:
            tensor = state.get(kind)
            if tensor is None and isinstance(optimizer, SGD):
                continue
            if not isinstance(tensor, Tensor):
                return f"{name} has a state without {kind}"
            if (tensor.shape, tensor.dtype, tensor.device) != (parameter.shape, parameter.dtype, parameter.device):
                return f"{kind} of {name} is unlike the parameter"
            if tensor.stride() != torch.empty_like(parameter, device="meta").stride():
                return f"{kind} of {name} is laid out unlike the parameter"
        counter = state.get("step")
        where = parameter.device.type if "step" in kinds else "cpu"
        if not isinstance(optimizer, SGD) and not (isinstance(counter, Tensor) and counter.device.type == where):
            return f"{name} has a state without a counter on the {where}"
    return ""


def _update(optimizer: Optimizer, trained: Mapping[str, nn.Parameter], *, by_age: bool) -> Update:
    names = {id(parameter): name for name, parameter in trained.items()}
    found: list[tuple[int, tuple[str, ...]]] = []
    for number, group in enumerate(optimizer.param_groups):
        mine = [parameter for parameter in group["params"] if id(parameter) in names]
        ages: dict[int, list[str]] = {}
        matters = (
            bool(group["momentum"] and group["dampening"]) if isinstance(optimizer, SGD) else not group.get("fused")
        )
        for parameter in mine:
            ages.setdefault(age_of(optimizer, parameter) if by_age and matters else 0, []).append(names[id(parameter)])
        found += [(number, tuple(same)) for same in ages.values()] or [(number, ())]
    groups = optimizer.param_groups
    first = groups[found[0][0]]
    spec = OptimizerSpec(
        _kind(optimizer, first),
        amsgrad=bool(first.get("amsgrad")),
        **_numbers(first),
        groups=tuple(ParameterGroup(same, **_numbers(groups[number])) for number, same in found[1:]),
    )
    return Update(spec, tuple(number for number, _ in found))


def _kind(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    if isinstance(optimizer, SGD):
        return "momentum" if group["momentum"] else "sgd"
    return "adamw" if group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)) else "adam"


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers, as a rule has them."""
    found: dict[str, Any] = {name: float(group[name]) for name in _NUMBERS if name in group and name != "betas"}
    found.update({name: bool(group[name]) for name in _FLAGS if name in group})
    if "betas" in group:
        first, second = (float(beta) for beta in group["betas"])
        found["betas"] = (first, second)
    return {**found, "foreach": group.get("foreach"), "fused": group.get("fused")}


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)
