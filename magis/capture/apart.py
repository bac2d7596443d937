"""The memory of an optimizer that runs by itself after a step: its own code, on tensors without memory."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as global_hooks

from magis.aten.held import PREFIX
from magis.aten.host_random import generators_kept
from magis.capture.hollow import hollow, hollow_like
from magis.capture.recorder import Recorder
from magis.ir import Graph

__all__ = ["Apart", "step_apart"]

AHEAD = 8
"""Steps before the one that is looked at: some optimizers begin in another way than they go on."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class Apart:
    """A step of an optimizer on trained parameters and their gradients (kind "batch"), as in `Captured`."""

    graph: Graph
    deaths: Mapping[int, int]

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Of every tensor that the optimizer keeps."""
        return tuple(s.nbytes for s in self.graph.storages.values() if s.kind == "state")


def step_apart(optimizer: Optimizer, graded: Mapping[str, nn.Parameter], device: str) -> Apart | None:
    """What `optimizer.step()` does once it has state, with gradients for the parameters `graded`; nothing is changed.

    None for an optimizer whose step cannot be looked at: it reads numbers off gradients, say, or is patched.
    """
    own = vars(optimizer)
    patched = getattr(own.get("step"), "__func__", own.get("step"))
    hooked = global_hooks._global_optimizer_pre_hooks or global_hooks._global_optimizer_post_hooks
    if hooked or (patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False)):
        return None
    try:
        with generators_kept(), torch.enable_grad():
            return _recorded(optimizer, graded, device)
    except Exception:  # noqa: BLE001  (anybody's code)
        return None


def _recorded(optimizer: Optimizer, graded: Mapping[str, nn.Parameter], device: str) -> Apart:
    made = _twin(optimizer, device)
    names = {id(parameter): name for name, parameter in zip(graded, _of(made, optimizer, graded), strict=True)}
    met = count()
    with hollow():
        for group in made.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter) if id(parameter) in names else None
        for _ in range(AHEAD):
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
        for number, tensor in enumerate(_tensors(made.state)):
            recorder.register(tensor, "state" if tensor.dim() else "host", f"state:{number}")
        with recorder:
            made.step()
        return Apart(recorder.graph(()), recorder.deaths)


def _of(made: Optimizer, optimizer: Optimizer, graded: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """The twins of parameters, in their order."""
    theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    twins = [parameter for group in made.param_groups for parameter in group["params"]]
    known = {id(parameter): twin for parameter, twin in zip(theirs, twins, strict=True)}
    return [known[id(parameter)] for parameter in graded.values()]


def _twin(optimizer: Optimizer, device: str) -> Optimizer:
    """An optimizer like this one, on parameters and state without memory, that nobody's hooks hear of."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = {str(number): each for number, each in enumerate((*parameters, *_tensors(optimizer.state)))}
    with hollow():  # a twin for a GPU's tensor, too
        looks = {name: torch.empty_like(each, device="cpu") if each.is_cuda else each for name, each in held.items()}
    twins = hollow_like(looks, known=lambda _name, each: not each.dim())
    memo: dict[int, Any] = {
        id(each): nn.Parameter(twins[name], each.requires_grad) if isinstance(each, nn.Parameter) else twins[name]
        for name, each in held.items()
    }
    own = {name: value for name, value in vars(optimizer).items() if name not in (*_HOOKS, "step")}
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(copy.deepcopy(own, memo))
    vars(made).update({name: OrderedDict() for name in _HOOKS})
    for group in made.param_groups:
        if device != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # as torch chooses on a GPU
    return made


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for part in item.values():
            yield from _tensors(part)
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _tensors(part)
