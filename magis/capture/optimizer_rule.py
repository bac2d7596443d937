"""Conversion of a user's optimizer to an update that can be part of the step, or the reason why it cannot.

Part of the step are `torch.optim.SGD`, `Adam` and `AdamW` without patches, each parameter group with its own numbers,
also if parameters have done different numbers of steps. Learning rates may change from step to step. The code of any
other optimizer is part of the step for one parameter at a time (`one_by_one`), or is called after the step, as in any
loop, on gradients that are all kept to the end.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import SGD, Adam, AdamW, Optimizer, adam, sgd
from torch.optim import optimizer as global_hooks

from magis.capture.contents import hollow_like
from magis.capture.hollow import Answering, Hollow, hollow
from magis.capture.recorder import Recorder
from magis.errors import CaptureError
from magis.graph import Graph
from magis.ops.generators import generators_kept
from magis.ops.optimizers import (
    AHEAD,
    OptimizerSpec,
    OwnOptimizer,
    ParameterGroup,
    copied,
    named_tensors,
    state_dtype,
    state_names,
)
from magis.ops.own_updates import grouped, view_of
from magis.ops.python_objects import PREFIX

_OFF = ("capturable", "differentiable")
"""Options with numbers that a planned step does not compute."""
_NOT_FUSED = ("dampening", "nesterov", "maximize", "amsgrad")
"""Options that a planned step supports only if the update is not fused."""
_NUMBERS = ("lr", "momentum", "betas", "eps", "weight_decay", "dampening")
_FLAGS = ("nesterov", "maximize")
_METHODS = ("step", "zero_grad", "_init_group")
_SPACES, _FUNCTIONS = zip(
    *(
        (vars(module), name)
        for module in (adam, sgd)
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ != "typing"
    ),
    strict=True,
)
"""Names of the functions that torch's optimizers call, and the namespaces in which they are looked up."""


@dataclass(frozen=True)
class Update:
    """The current update of an optimizer, and the parameter group of each of its rules."""

    spec: OptimizerSpec
    homes: tuple[int, ...]
    """Index of the optimizer's parameter group for each rule in `spec.alone()`."""

    @cached_property
    def frozen_in(self) -> OptimizerSpec:
        """The update as a plan has it in constants: without the learning rates."""
        return replace(self.spec, lr=0.0, groups=tuple(replace(group, lr=0.0) for group in self.spec.groups))


def why_apart(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
    """Return in words why an optimizer cannot be part of the step; "" if it can."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} is none of SGD, Adam, AdamW"
    code = [(f"its {name}", getattr(optimizer, name)) for name in _METHODS]
    code += [(f"{name} of torch.optim", space.get(name)) for space, name in zip(_SPACES, _FUNCTIONS, strict=True)]
    for what, function in code:
        if not _is_torchs_own(function):
            return f"{what} is not torch's own"
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
    # skip frozen parameters, as torch does
    mine = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
    theirs = {id(parameter) for parameter in trained.values()}
    if mine != theirs:
        only = "some that the model does not train" if mine - theirs else "not all that the model trains"
        return f"its parameters are {only}"
    if has_hooks(optimizer):
        return "hooks run before or after its step"
    return _odd_state(optimizer, trained)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's `step` needs a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def fused_rule(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> OptimizerSpec:
    """Return the update of an optimizer accepted by `why_apart`, with its current numbers, as if all its parameters had
    done equally many steps. `trained` are the parameters by their names in the captured module."""
    return _update(optimizer, trained, by_age=False).spec


def update_of(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> Update:
    """Return the update of an optimizer, with a separate rule for parameters that have done another number of steps."""
    return _update(optimizer, trained, by_age=True)


def age_of(optimizer: Optimizer, parameter: nn.Parameter) -> float:
    """Return the number of steps that a parameter has done, if its next update depends on it; else 0."""
    state = optimizer.state.get(parameter, {})
    if isinstance(optimizer, SGD):
        return int(state.get("momentum_buffer") is not None)
    return float(state.get("step", 0))


def with_rates(update: Update, optimizer: Optimizer) -> OptimizerSpec:
    """Return the update with the current learning rates of the optimizer's parameter groups."""
    first, *others = rates = [float(optimizer.param_groups[home]["lr"]) for home in update.homes]
    if rates == [update.spec.lr, *(group.lr for group in update.spec.groups)]:
        return update.spec
    groups = tuple(replace(group, lr=rate) for group, rate in zip(update.spec.groups, others, strict=True))
    return replace(update.spec, lr=first, groups=groups)


def fingerprint(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return all that `why_apart` and `update_of` depend on, except state and values of learning rates, for
    comparison."""
    groups = []
    for group in optimizer.param_groups:
        numbers = tuple(
            (name, type(value) if name == "lr" else value if type(value) in (int, float, bool, tuple) else id(value))
            for name, value in group.items()
            if name != "params"
        )
        groups.append((numbers, [(id(parameter), parameter.requires_grad) for parameter in group["params"]]))
    kind, own = type(optimizer), vars(optimizer)
    return (
        kind,
        *map(dict.get, _SPACES, _FUNCTIONS),
        *(getattr(kind, name, None) for name in _METHODS),
        *(own.get(name) for name in _METHODS),
        *map(bool, _hooks(optimizer)),
        *groups,
    )


def has_hooks(optimizer: Optimizer) -> bool:
    """Return True if hooks run before or after the optimizer's step."""
    return any(_hooks(optimizer))


def _hooks(optimizer: Optimizer) -> tuple[Any, ...]:
    return (
        getattr(optimizer, "_optimizer_step_pre_hooks", None),
        getattr(optimizer, "_optimizer_step_post_hooks", None),
        global_hooks._global_optimizer_pre_hooks,
        global_hooks._global_optimizer_post_hooks,
    )


def _is_torchs_own(method: Any) -> bool:
    """Return True for a method of torch, also if torch wraps it (profiling, learning-rate schedulers)."""
    while method is not None:
        function = getattr(method, "__func__", method)
        code = getattr(function, "__code__", None)
        if code is None or not str(function.__globals__.get("__name__", "")).startswith("torch."):
            return False
        method = getattr(function, "__wrapped__", None)
    return True


def _odd_state(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
    """Return in words what state the optimizer's first step would not create, as after a change of options; "" if
    none."""
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
        ages: dict[float, list[str]] = {}
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
        **_numbers_of_group(first),
        groups=tuple(ParameterGroup(same, **_numbers_of_group(groups[number])) for number, same in found[1:]),
    )
    return Update(spec, tuple(number for number, _ in found))


def _kind(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    if isinstance(optimizer, SGD):
        return "momentum" if group["momentum"] else "sgd"
    return "adamw" if group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)) else "adam"


def _numbers_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group as arguments of an update rule."""
    found: dict[str, Any] = {name: float(group[name]) for name in _NUMBERS if name in group and name != "betas"}
    found.update({name: bool(group[name]) for name in _FLAGS if name in group})
    if "betas" in group:
        first, second = (float(beta) for beta in group["betas"])
        found["betas"] = (first, second)
    return {**found, "foreach": group.get("foreach"), "fused": group.get("fused")}


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)


ALONE = "gate forward and backward alone, with the optimizer 'gradients', or the loop as it runs, by magis.peak"


@dataclass(frozen=True)
class Apart:
    """A captured step of an optimizer on trained parameters and their gradients (inputs of kind "batch")."""

    graph: Graph
    deaths: Mapping[int, int]

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of every tensor in the optimizer's state."""
        return tuple(s.nbytes for s in self.graph.storages.values() if s.kind == "state")


def is_left_alone(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's `step` is that of its class, without patches, and no global hooks exist."""
    own = vars(optimizer)
    patched = getattr(own.get("step"), "__func__", own.get("step"))
    hooked = global_hooks._global_optimizer_pre_hooks or global_hooks._global_optimizer_post_hooks
    return not hooked and (patched is None or getattr(patched, "_wrapped_by_lr_sched", False))


def step_apart(optimizer: Optimizer, graded: Mapping[str, Tensor], device: str) -> Apart | None:
    """Capture `optimizer.step()` with existing state and with gradients of the parameters `graded`; change nothing.
    Return None if it cannot be captured: it reads numbers off gradients, say, or is patched."""
    if not is_left_alone(optimizer):
        return None
    try:
        with generators_kept(), torch.enable_grad():
            return recorded_step(optimizer, graded, graded, device, AHEAD, Answering())
    except Exception:  # noqa: BLE001  (anybody's code)
        return None


def step_behind(own: OwnOptimizer, graded: Mapping[str, Tensor], device: str) -> Apart:
    """Capture `step()` of a user's own optimizer on other parameters, `graded` by name. Raises CaptureError if it
    cannot be captured, or if later steps run other operators."""
    mine = {name: each for name, each in own.parameters.items() if name in graded}
    try:
        with generators_kept(), torch.enable_grad():
            found, later = (recorded_step(own.optimizer, mine, graded, device, AHEAD + more) for more in (0, 1))
    except Exception as error:
        why = f"cannot be recorded: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        if isinstance(error, DataDependentOutputException):
            why = "reads numbers off its tensors, by which its operators may differ"
        raise CaptureError(f"{own.name}.step {why}", hint=ALONE) from error
    if _course(found) != _course(later):
        raise CaptureError(f"{own.name}.step runs other operators in step {AHEAD + 2} than before", hint=ALONE)
    for storage in found.graph.storages.values():
        if storage.kind == "state" and storage.id in found.deaths:
            (name, *_) = (value.name for value in found.graph.values.values() if value.storage == storage.id)
            what = f"{own.name}.step puts a new tensor in the place of {name.removeprefix('state:')!r}"
            raise CaptureError(what, hint=f"write it in place (copy_), or {ALONE}")
    return found


def _course(apart: Apart) -> list[tuple[str, tuple[int, ...]]]:
    """Return the operators of a step, with the bytes of their results."""
    values = apart.graph.values
    return [(op.target, tuple(values[made].nbytes for made in op.made())) for op in apart.graph.ops]


def recorded_step(
    optimizer: Optimizer,
    graded: Mapping[str, Tensor],
    likes: Mapping[str, Tensor],
    device: str,
    ahead: int,
    mode: Hollow | None = None,
    *,
    alone: bool = False,
) -> Apart:
    """Record the step after `ahead` ones of a hollow copy of the optimizer, for parameters `graded` by name, `alone` or
    beside all others; `likes` give their layouts."""
    made, twins = hollow_twin(optimizer, {id(each): likes[name] for name, each in graded.items()}, device)
    names = {id(twins[id(each)]): name for name, each in graded.items()}
    if alone:
        made = view_of(made, grouped(made, names))
    met = count()
    with hollow(mode), torch.compiler.set_stance("force_eager"):  # what is compiled now would be of hollow tensors
        for group in made.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter) if id(parameter) in names else None
        for _ in range(ahead):
            made.step()
        recorder = Recorder({}, lambda _tensor: f"{PREFIX}optimizer/{next(met)}")
        recorder.phase = "update"
        for group in made.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    continue
                name = names[id(parameter)]
                recorder.register(parameter, "parameter", f"parameter:{name}")
                recorder.register(parameter.grad, "batch", f"gradient:{name}")
        for owner, entries in made.state.items():
            for path, tensor in named_tensors(entries) if id(owner) in names or not alone else ():
                name = f"state:{path}:{names.get(id(owner), next(met))}"
                recorder.register(tensor, "state" if tensor.dim() else "host", name)
                del tensor  # which a step may replace
        with recorder:
            made.step()
        return Apart(recorder.graph(()), recorder.deaths)


def hollow_twin(optimizer: Optimizer, likes: Mapping[int, Tensor], device: str) -> tuple[Optimizer, Mapping[int, Any]]:
    """Return a copy of the optimizer on hollow parameters and state; and the hollow tensors by `id` of the original.
    `likes` gives tensors, by the parameters' `id`, whose layout the copied parameters take."""
    held = {id(each): likes.get(id(each), each) for group in optimizer.param_groups for each in group["params"]}
    kept = [
        (tensor, state_dtype(tensor, parameter, held.get(id(parameter), parameter)))
        for parameter, entries in optimizer.state.items()
        for _, tensor in named_tensors(entries)
    ]
    with hollow():  # a twin for a GPU's tensor, too
        looks = {
            f"{name}": torch.empty_like(each, device="cpu") if each.is_cuda else each for name, each in held.items()
        }
        for tensor, dtype in kept:
            same = dtype == tensor.dtype and not tensor.is_cuda
            looks[f"{id(tensor)}"] = tensor if same else torch.empty_like(tensor, dtype=dtype, device="cpu")
    found = hollow_like(looks, known=lambda _name, each: not each.dim())
    twins: dict[int, Any] = {id(tensor): found[f"{id(tensor)}"] for tensor, _ in kept}
    for group in optimizer.param_groups:
        for each in group["params"]:
            twins[id(each)] = nn.Parameter(found[f"{id(each)}"], each.requires_grad)
    made = copied(optimizer, twins)
    for group in made.param_groups:
        if device != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # as torch chooses on a GPU
    return made, twins
