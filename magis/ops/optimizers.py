"""Weight updates as in-place operators, per tensor (no foreach, not fused); copies of optimizers of any class.

The operators are those of the single-tensor loops of ``torch.optim.SGD`` and ``torch.optim.Adam(W)``, so that captured
and eager steps agree bit for bit and byte for byte; ``optimizer_forms`` has the foreach and fused updates. Numbers that
change from step to step (learning rate, bias corrections) are named scalars: during capture, sentinels, which occur
nowhere else in the step.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from magis.errors import UsageError
from magis.ops.own_updates import OwnUpdate, state_places

# Users' optimizers of any class: copies for other parameters, and their state.

AHEAD = 8
"""Warm-up steps before the step that is examined: the first steps of some optimizers differ from later ones."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NUMBERS = (bool, int, float)

Tensors: TypeAlias = Sequence[Tensor]
States: TypeAlias = Sequence[Mapping[str, Tensor]]
Numbers: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, eq=False, repr=False)
class OwnOptimizer:
    """An optimizer of any class that runs after the captured step; its parameters are matched by name."""

    optimizer: Optimizer
    names: Mapping[int, str]
    """Names of the optimizer's parameters in the module, by `id`."""

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def is_torchs(self) -> bool:
        """Return True if the class is torch's own, which defaults to foreach on a GPU."""
        return type(self.optimizer).__module__.startswith("torch.optim.")

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the optimizer's parameters that belong to the module, by name."""
        every = (each for group in self.optimizer.param_groups for each in group["params"])
        return {self.names[id(each)]: each for each in every if id(each) in self.names}

    def on(self, parameters: Mapping[str, Tensor]) -> Optimizer:
        """Return a copy, without hooks, for these parameters (by name), the state copied to their devices."""
        twins: dict[int, Any] = {id(each): parameters[name] for name, each in self.parameters.items()}
        for parameter, entries in self.optimizer.state.items():
            like = twins.get(id(parameter), parameter)
            for _, tensor in named_tensors(entries):
                # counters stay on the host
                where = like.device if tensor.dim() else tensor.device
                twins[id(tensor)] = torch.empty_like(tensor, dtype=state_dtype(tensor, parameter, like), device=where)
                twins[id(tensor)].copy_(tensor.detach())
        return copied(self.optimizer, twins)

    def __repr__(self) -> str:
        """Return the class and its hyperparameters: optimizers with equal texts run equal updates."""
        kind = type(self.optimizer)
        numbers = [
            {name: value for name, value in group.items() if isinstance(value, (*_NUMBERS, str, tuple))}
            for group in self.optimizer.param_groups
        ]
        return f"{kind.__module__}.{kind.__qualname__}({numbers})"


def state_dtype(tensor: Tensor, parameter: Any, like: Any) -> torch.dtype:
    """Return the dtype of a state tensor copied to the parameter `like`, by the rule of `load_state_dict`."""
    follows = isinstance(parameter, Tensor) and tensor.dim() and tensor.dtype == parameter.dtype
    return like.dtype if follows else tensor.dtype


def copied(optimizer: Optimizer, twins: Mapping[int, Any]) -> Optimizer:
    """Return a copy of an optimizer without hooks, its tensors replaced by `twins` (by `id`)."""
    own = {name: value for name, value in vars(optimizer).items() if name not in (*_HOOKS, "step")}
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(copy.deepcopy(own, dict(twins)))
    vars(made).update({name: OrderedDict() for name in _HOOKS})
    return made


def named_tensors(item: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in nested dictionaries and lists with its path ("exp_avg")."""
    if isinstance(item, Tensor):
        yield "", item
    elif isinstance(item, (Mapping, list, tuple)):
        yield from ((path, holder[key]) for path, holder, key in state_places(item))


def state_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an optimizer's state by name: tensors, and numbers of state and parameter groups as 0-d tensors."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for parameter, entries in optimizer.state.items():
        owner = names.get(id(parameter), "")
        found.update({f"{path}:{owner}": tensor for path, tensor in named_tensors(entries)})
        if isinstance(entries, Mapping):
            found.update({f"{path}:{owner}": tensor for path, tensor in _tensors_in(entries)})
    for number, group in enumerate(optimizer.param_groups):
        found.update({f"{path}:group {number}": tensor for path, tensor in _tensors_in(group)})
    return found


def _tensors_in(entries: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in entries.items():
        if isinstance(value, _NUMBERS):
            yield f"{name}", torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group: names of parameters, and their hyperparameters."""

    parameters: tuple[str, ...]
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    foreach: bool | None = None
    fused: bool | None = None
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class OptimizerSpec:
    """The weight update: an optimizer with the hyperparameters and defaults of `torch.optim`.

    Hyperparameters apply to all parameters outside of `groups`. `kind`: "sgd" is `SGD` without momentum, "momentum"
    `SGD` with momentum, "adam" and "adamw" as in torch; "gradients" stops after the backward and returns the gradients;
    "none" is inference, without backward and update; "apart" also stops after the backward, and `own` runs afterwards;
    "own" runs the optimizer's own code on each parameter, as `updates` say.
    `foreach` and `fused` are torch's; None: the default of the device (see `way`).
    """

    kind: str
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: tuple[ParameterGroup, ...] = ()
    foreach: bool | None = None
    fused: bool | None = None
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    amsgrad: bool = False
    """torch's `amsgrad`, for all parameters: adds one state tensor per parameter."""
    own: OwnOptimizer | None = None
    """Optimizer of the user for `kind` "apart"."""
    updates: tuple[OwnUpdate, ...] = ()
    """One per parameter for `kind` "own"."""
    whole: Any = field(default=None, compare=False, repr=False)
    """The optimizer's step as eager runs it, captured (`magis.capture.optimizer_rule.Apart`), for `kind` "own"."""
    accumulate: int = 1
    """Micro-batches whose gradients are added up for one update; each loss is divided by their number."""
    cuts: bool = False
    """True if the micro-batches are parts of the batch along dimension 0; False if each is the whole batch."""

    def __post_init__(self) -> None:
        if type(self.accumulate) is not int or self.accumulate < 1 or (self.accumulate > 1 and self.kind == "none"):
            hint = "give a number of micro-batches from 1 on, and an optimizer"
            raise UsageError(f"gradients of {self.accumulate!r} micro-batches for {self.kind!r}", hint=hint)
        known = self.kind in OPTIMIZER_KINDS or self.kind == "own"
        if not known and (self.kind != "apart" or self.own is None):
            raise UsageError(f"unknown optimizer {self.kind!r}", hint=f"use one of {', '.join(OPTIMIZER_KINDS)}")
        ways = [(self.foreach, self.fused), *((group.foreach, group.fused) for group in self.groups)]
        if len({bool(fused) for _, fused in ways}) > 1 or any(foreach and fused for foreach, fused in ways):
            raise UsageError("an optimizer is fused in all of its groups or in none, and then not foreach")

    @property
    def stops(self) -> bool:
        """Return True if graphs of the step return gradients instead of updating weights."""
        return self.kind in ("gradients", "apart")

    def micro_batches(self, inputs: Tensors, targets: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
        """Yield the inputs and targets of each forward and backward of a step."""
        for number in range(self.accumulate):
            if not self.cuts:
                yield inputs, targets
                continue
            rows = inputs[0].shape[:1]
            parts = [t.tensor_split(self.accumulate)[number] if t.shape[:1] == rows else t for t in (*inputs, *targets)]
            yield parts[: len(inputs)], parts[len(inputs) :]

    def share(self, loss: Any) -> Any:
        """Return the loss of a micro-batch divided by the number of micro-batches."""
        return loss / self.accumulate if self.accumulate > 1 else loss

    def way(self, device: str) -> str:
        """Return the implementation of the update that torch uses on a device type, groups ignored.

        "loop" is per tensor, "foreach" per list of tensors, "fused" one kernel.
        """
        if self.fused:
            return "fused"
        chosen = device != "cpu" if self.foreach is None and self.fused is None else self.foreach
        return "foreach" if chosen else "loop"

    def looped(self) -> OptimizerSpec:
        """Return a copy of the rule with foreach and fused off, in groups as well."""
        groups = tuple(replace(group, foreach=False, fused=False) for group in self.groups)
        return replace(self, foreach=False, fused=False, groups=groups)

    def alone(self) -> tuple[OptimizerSpec, ...]:
        """Return one rule without groups per parameter group; parameters in no group come first."""
        if not self.groups:
            return (self,)
        own = tuple(each.name for each in fields(ParameterGroup) if each.name != "parameters")
        numbers: list[dict[str, Any]] = [{name: getattr(group, name) for name in own} for group in self.groups]
        return tuple(replace(self, groups=(), **given) for given in ({}, *numbers))

    def split(self, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return, for each rule in `alone`, the positions in `names` of its parameters.

        Raises UsageError if a group names a parameter that is not in `names`.
        """
        unknown = sorted({name for group in self.groups for name in group.parameters} - set(names))
        if unknown:
            raise UsageError(
                f"the optimizer has a group with {unknown[0]!r}, which is not trained",
                hint="name parameters as named_parameters() does",
            )
        home = {name: number for number, group in enumerate(self.groups, 1) for name in group.parameters}
        return tuple(
            tuple(position for position, name in enumerate(names) if home.get(name, 0) == number)
            for number in range(len(self.groups) + 1)
        )


OPTIMIZER_KINDS = ("sgd", "momentum", "adam", "adamw", "gradients", "none")
SCALAR_NAMES = ("neg_lr", "neg_step_size", "decay", "bias_correction2_sqrt", "lr", "undampened")
MOMENTS = ("exp_avg", "exp_avg_sq")


def sentinel(base: float, index: int) -> float:
    """Return a number near `base` that no module uses by accident: its last bits encode an index."""
    return base * (1 + (0x3A5F1 + index) * 2.0**-47)


def sentinels(rule: OptimizerSpec) -> dict[str, float]:
    """Return the sentinels of the step-dependent scalars for capture, by name."""
    names = [_of_group(name, number) for number in range(len(rule.groups) + 1) for name in SCALAR_NAMES]
    return {name: sentinel(0.0078125, index) for index, name in enumerate(names)}


def _of_group(name: str, number: int) -> str:
    """Return a scalar's name in a parameter group, a Python identifier: "neg_lr" in group 0, "neg_lr_1" in group 1."""
    return f"{name}_{number}" if number else name


def state_names(rule: OptimizerSpec) -> tuple[str, ...]:
    """Return the names of the state tensors per parameter, as in ``optimizer.state``.

    Step counters are included for fused updates, which count on the device; otherwise the host counts.
    """
    if rule.kind == "momentum":
        return ("momentum_buffer",)
    if rule.kind in ("adam", "adamw"):
        moments = (*MOMENTS, "max_exp_avg_sq") if rule.amsgrad else MOMENTS
        return ("step", *moments) if rule.fused else moments
    return ()


def states_by_name(rule: OptimizerSpec, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of an optimizer that runs this rule, keyed as graph inputs: "exp_avg:layer.weight"."""
    if rule.kind == "apart":
        return state_of(optimizer, parameters)
    kept = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    kinds = state_names(rule)
    return {f"{kind}:{name}": state[kind] for name, state in kept.items() for kind in kinds if kind in state}


def new_states(rule: OptimizerSpec, name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Return new state tensors of a parameter, keyed as in ``state_names``."""
    if rule.kind == "own":
        kept = next(each.state for each in rule.updates if each.name == name)
        return {each.path: each.empty(parameter.device) for each in kept}
    return {kind: new_state(kind, parameter) for kind in state_names(rule)}


def new_state(kind: str, parameter: Tensor) -> Tensor:
    """Return a new state tensor with its value before the first step."""
    if kind == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)


def scalars(rule: OptimizerSpec, step: float | Sequence[float]) -> dict[str, float]:
    """Return the named scalars at a step (1 is the first), computed on the host as ``torch.optim`` does.

    ``step`` may be one number, or one per rule in ``alone``.
    """
    groups = rule.alone()
    steps = [step] * len(groups) if isinstance(step, (int, float)) else step
    found: dict[str, float] = {}
    for number, (group, each) in enumerate(zip(groups, steps, strict=True)):
        own = {"lr": group.lr, "neg_lr": -group.lr}
        if group.kind == "momentum":  # in the first step the buffer is a copy of the gradient
            own["undampened"] = 1 - group.dampening if each > 1 else 1
        if group.kind in ("adam", "adamw"):
            beta1, beta2 = group.betas
            # torch.optim counts steps in a float32 tensor and reads it back; exact up to 2**24 steps.
            count = float(each)
            own["neg_step_size"] = -(group.lr / (1 - beta1**count))
            own["bias_correction2_sqrt"] = (1 - beta2**count) ** 0.5
            own["decay"] = 1 - group.lr * group.weight_decay
        found |= {_of_group(name, number): value for name, value in own.items()}
    return found


def torch_optimizer(rule: OptimizerSpec, params: Mapping[str, Tensor]) -> Optimizer | None:
    """Return a ``torch.optim`` optimizer for these parameters that runs the rule; None for "gradients" and "none"."""
    if rule.own is not None and rule.kind == "apart":
        return rule.own.on(params)
    if rule.kind in ("gradients", "none"):
        return None
    tensors = list(params.values())
    groups = []
    for group, positions in zip(rule.alone(), rule.split(tuple(params)), strict=True):
        own: dict[str, Any] = {"betas": group.betas, "eps": group.eps, "amsgrad": group.amsgrad}
        if group.kind in ("sgd", "momentum"):
            momentum = group.momentum if group.kind == "momentum" else 0.0
            own = {"momentum": momentum, "dampening": group.dampening, "nesterov": group.nesterov}
        own |= {"lr": group.lr, "weight_decay": group.weight_decay}
        own |= {"foreach": group.foreach, "fused": group.fused, "maximize": group.maximize}
        groups.append({"params": [tensors[position] for position in positions], **own})
    if rule.kind in ("sgd", "momentum"):
        return torch.optim.SGD(groups, foreach=rule.foreach, fused=rule.fused)
    cls = torch.optim.AdamW if rule.kind == "adamw" else torch.optim.Adam
    return cls(groups, foreach=rule.foreach, fused=rule.fused)


def one_by_one(rule: OptimizerSpec, params: Mapping[str, Tensor]) -> dict[str, Optimizer]:
    """Return an optimizer for each of these parameters, by name, that runs the rule of the parameter's group."""
    names, found = tuple(params), dict[str, Optimizer]()
    for group, positions in zip(rule.alone(), rule.split(names), strict=True):
        for position in positions:
            name = names[position]
            if (optimizer := torch_optimizer(group, {name: params[name]})) is not None:
                found[name] = optimizer
    return found


def numbers_of(rule: OptimizerSpec, numbers: Mapping[str, float]) -> tuple[dict[str, float], ...]:
    """Return the named scalars of each rule in ``alone``, without the group's suffix in their names."""
    return tuple(
        {name: numbers[there] for name in SCALAR_NAMES if (there := _of_group(name, each)) in numbers}
        for each in range(len(rule.alone()))
    )


def by_loop(rule: OptimizerSpec, params: Tensors, grads: Tensors, states: States, numbers: Numbers) -> None:
    """Run the per-tensor update of a rule without groups; states are keyed as in ``state_names``."""
    _STEPS[rule.kind](rule, params, grads, states, numbers)


def _sgd(rule: OptimizerSpec, params: Tensors, grads: Tensors, states: States, numbers: Numbers) -> None:
    for param, given, state in zip(params, grads, states, strict=True):
        grad = -given if rule.maximize else given  # reuses one name, so that each temporary lives as long as in torch
        if rule.weight_decay != 0:
            grad = grad.add(param, alpha=rule.weight_decay)
        if rule.kind == "momentum":
            buffer = state["momentum_buffer"]
            buffer.mul_(rule.momentum).add_(grad, alpha=numbers["undampened"] if rule.dampening else 1)
            grad = grad.add(buffer, alpha=rule.momentum) if rule.nesterov else buffer
        param.add_(grad, alpha=numbers["neg_lr"])


def _adam(rule: OptimizerSpec, params: Tensors, grads: Tensors, states: States, numbers: Numbers) -> None:
    beta1, beta2 = rule.betas
    for whole, given, state in zip(params, grads, states, strict=True):
        grad, param = -given if rule.maximize else given, whole
        exp_avg, exp_avg_sq, most = state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq")
        if rule.weight_decay != 0:
            if rule.kind == "adamw":
                param.mul_(numbers["decay"])
            else:
                grad = grad.add(param, alpha=rule.weight_decay)
        if param.is_complex():  # pairs of real numbers
            grad, exp_avg, exp_avg_sq, param = map(torch.view_as_real, (grad, exp_avg, exp_avg_sq, param))
            most = None if most is None else torch.view_as_real(most)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        second = exp_avg_sq if most is None else torch.maximum(most, exp_avg_sq, out=most)
        denom = (second.sqrt() / numbers["bias_correction2_sqrt"]).add_(rule.eps)
        param.addcdiv_(exp_avg, denom, value=numbers["neg_step_size"])


_STEPS: dict[str, Callable[..., None]] = {"sgd": _sgd, "momentum": _sgd, "adam": _adam, "adamw": _adam}
