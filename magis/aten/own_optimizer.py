"""Optimizers of any class, as a user made them: copies of one on other parameters, and all that it keeps."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["AHEAD", "OwnOptimizer", "copied", "named_tensors", "refitted", "state_of"]

AHEAD = 8
"""Steps before the one that is looked at: some optimizers begin in another way than they go on."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NUMBERS = (bool, int, float)


@dataclass(frozen=True, eq=False, repr=False)
class OwnOptimizer:
    """An optimizer that runs by itself behind a step, on parameters of another module by their names."""

    optimizer: Optimizer
    names: Mapping[int, str]
    """Of its parameters, by `id`, as the module has them."""

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def is_torchs(self) -> bool:
        """Whether torch has the class, whose steps go by lists on a GPU unless they are asked to do otherwise."""
        return type(self.optimizer).__module__.startswith("torch.optim.")

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those of its parameters that the module has, by name."""
        every = (each for group in self.optimizer.param_groups for each in group["params"])
        return {self.names[id(each)]: each for each in every if id(each) in self.names}

    def on(self, parameters: Mapping[str, Tensor]) -> Optimizer:
        """A copy that updates these parameters, by name, and nobody's hooks hear of."""
        twins: dict[int, Any] = {id(each): parameters[name] for name, each in self.parameters.items()}
        for parameter, entries in self.optimizer.state.items():
            like = twins.get(id(parameter), parameter)
            for _, tensor in named_tensors(entries):
                # counters stay on the host
                where = like.device if tensor.dim() else tensor.device
                twins[id(tensor)] = torch.empty_like(tensor, dtype=refitted(tensor, parameter, like), device=where)
                twins[id(tensor)].copy_(tensor.detach())
        return copied(self.optimizer, twins)

    def __repr__(self) -> str:
        """The class and its numbers: equal texts are of equal updates."""
        kind = type(self.optimizer)
        numbers = [
            {name: value for name, value in group.items() if isinstance(value, (*_NUMBERS, str, tuple))}
            for group in self.optimizer.param_groups
        ]
        return f"{kind.__module__}.{kind.__qualname__}({numbers})"


def refitted(tensor: Tensor, parameter: Any, like: Any) -> torch.dtype:
    """The data type of a state's tensor once its parameter has that of another one, as `load_state_dict` has it."""
    follows = isinstance(parameter, Tensor) and tensor.dim() and tensor.dtype == parameter.dtype
    return like.dtype if follows else tensor.dtype


def copied(optimizer: Optimizer, twins: Mapping[int, Any]) -> Optimizer:
    """An optimizer like this one with `twins` in place of tensors, by their `id`; without hooks."""
    own = {name: value for name, value in vars(optimizer).items() if name not in (*_HOOKS, "step")}
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(copy.deepcopy(own, dict(twins)))
    vars(made).update({name: OrderedDict() for name in _HOOKS})
    return made


def named_tensors(item: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dictionaries and lists, with the way to each ("exp_avg")."""
    if isinstance(item, Tensor):
        yield path, item
        return
    parts = item.items() if isinstance(item, Mapping) else enumerate(item) if isinstance(item, (list, tuple)) else ()
    for name, part in parts:
        yield from named_tensors(part, f"{path}.{name}" if path else f"{name}")


def state_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All that an optimizer keeps, by name: tensors, and the numbers of its state and its groups as tensors."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for parameter, entries in optimizer.state.items():
        owner = names.get(id(parameter), "")
        found.update({f"{path}:{owner}": tensor for path, tensor in named_tensors(entries)})
        if isinstance(entries, Mapping):
            found.update({f"{path}:{owner}": tensor for path, tensor in _numbers(entries)})
    for number, group in enumerate(optimizer.param_groups):
        found.update({f"{path}:group {number}": tensor for path, tensor in _numbers(group)})
    return found


def _numbers(entries: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in entries.items():
        if isinstance(value, _NUMBERS):
            yield f"{name}", torch.tensor(value, dtype=torch.float64)
