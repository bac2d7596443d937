"""The optimizer's own state, which the step reads and writes in place: what `state_dict()` saves stays true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.aten.optimizers import state_names
from magis.capture import OptimizerSpec
from magis.errors import UsageError

__all__ = ["State", "adopted"]


@dataclass(frozen=True, eq=False)
class State:
    """The tensors of an optimizer, by their names in the graph ("exp_avg:layer.weight")."""

    optimizer: Optimizer
    trained: Mapping[str, nn.Parameter]
    tensors: Mapping[str, Tensor]

    def is_current(self) -> bool:
        """Whether the optimizer still has these tensors; loading a state puts others in their place."""
        for name, tensor in self.tensors.items():
            kind, _, parameter = name.partition(":")
            if self.optimizer.state[self.trained[parameter]].get(kind) is not tensor:
                return False
        return True

    def counted(self) -> int:
        """The number of the step to come, by Adam's counters, which are one further from now on. 0 without counters."""
        counters = [
            state["step"]
            for parameter in self.trained.values()
            if isinstance((state := self.optimizer.state.get(parameter, {})).get("step"), Tensor)
        ]
        if not counters:
            return 0
        torch._foreach_add_(counters, 1)
        return int(counters[0])


def adopted(optimizer: Optimizer, rule: OptimizerSpec, trained: Mapping[str, nn.Parameter]) -> State:
    """The state of an optimizer; what it lacks is made as its own first step would make it.

    Raises UsageError if the parameters have gone different numbers of steps: their bias corrections would differ.
    """
    kinds = state_names(rule)
    if not kinds:
        return State(optimizer, trained, {})
    tensors = {}
    counts = set()
    names = {id(parameter): name for name, parameter in trained.items()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in names]
    for parameter in order:  # in which torch makes states, and `state_dict` has them
        name, state = names[id(parameter)], optimizer.state[parameter]
        if rule.kind in ("adam", "adamw"):
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
            counts.add(float(state["step"]))
        for kind in kinds:
            if state.get(kind) is None:  # SGD without a step so far has an entry of None
                state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
            tensors[f"{kind}:{name}"] = state[kind]
    if len(counts) > 1:
        raise UsageError(
            f"the optimizer's parameters have gone different numbers of steps: {sorted(counts)}",
            hint="pass None as the optimizer and run its step yourself",
        )
    return State(optimizer, trained, tensors)
