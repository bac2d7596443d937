"""The optimizer's own state, which the step reads and writes in place: what `state_dict()` saves stays true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture.optimizer_rule import Update, age_of
from magis.ops.branches import ExpectationError
from magis.ops.optimizers import new_state, state_names


@dataclass(eq=False)
class OptimizerState:
    """The tensors of an optimizer, by their names in the graph ("exp_avg:layer.weight")."""

    optimizer: Optimizer
    update: Update
    trained: Mapping[str, nn.Parameter]
    tensors: Mapping[str, Tensor]
    members: tuple[tuple[nn.Parameter, ...], ...]
    """Parameters of each rule of the update: they are of one age."""
    first: list[bool] = field(default_factory=list)
    """Of each rule: whether the step to come is the first of its parameters."""

    def is_current(self) -> bool:
        """Whether the optimizer still has these tensors (loading a state puts others in their place), and parameters of
        one rule are of one age."""
        for name, tensor in self.tensors.items():
            kind, _, parameter = name.partition(":")
            if self.optimizer.state[self.trained[parameter]].get(kind) is not tensor:
                return False
        counts = self._counts()
        return all(len({*some}) <= 1 for some in counts)

    def counted(self) -> tuple[int, ...]:
        """The number of the step to come, rule by rule; Adam's counters are one further from now on."""
        counters = [counter for some in self._counters() for counter in some]
        if not counters:
            steps = tuple(1 if first else 2 for first in self.first)
            self.first = [False] * len(self.first)
            return steps
        torch._foreach_add_(counters, 1)
        return tuple(int(some[0]) if some else 1 for some in self._counts())

    @contextmanager
    def step_to_come(self) -> Iterator[tuple[int, ...]]:
        """`counted`, taken back where the step finds that it cannot run."""
        first = [*self.first]
        try:
            yield self.counted()
        except ExpectationError:
            counters = [counter for some in self._counters() for counter in some]
            if counters:
                torch._foreach_sub_(counters, 1)
            self.first = first
            for new, some in zip(first, self.members, strict=True):
                for parameter in some if new else ():
                    if "momentum_buffer" in self.optimizer.state[parameter]:  # which torch makes of the first gradient
                        self.optimizer.state[parameter]["momentum_buffer"] = None
            raise

    def _counters(self) -> list[list[Tensor]]:
        if self.update.spec.kind not in ("adam", "adamw") or self.update.spec.fused:  # which count themselves
            return []
        state = self.optimizer.state
        return [[state[parameter]["step"] for parameter in some] for some in self.members]

    def _counts(self) -> list[list[float]]:
        counters = self._counters()
        flat = [counter for some in counters for counter in some]
        numbers = iter(torch.stack(flat).tolist() if flat else ())
        return [[next(numbers) for _ in some] for some in counters]


def adopted(optimizer: Optimizer, update: Update, trained: Mapping[str, nn.Parameter]) -> OptimizerState:
    """The state of an optimizer; what it lacks is made as its own first step would make it."""
    rule = update.spec
    home = {name: number for number, group in enumerate(rule.groups, 1) for name in group.parameters}
    members = tuple(
        tuple(parameter for name, parameter in trained.items() if home.get(name, 0) == number)
        for number in range(len(update.homes))
    )
    first = [all(age_of(optimizer, parameter) == 0 for parameter in some) for some in members]
    kinds = state_names(rule)
    tensors = {}
    names = {id(parameter): name for name, parameter in trained.items()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in names]
    for parameter in order if kinds else ():  # in which torch makes states, and `state_dict` has them
        name, state = names[id(parameter)], optimizer.state[parameter]
        if rule.kind in ("adam", "adamw") and "step" not in state:
            state["step"] = new_state("step", parameter) if rule.fused else torch.tensor(0.0, dtype=torch.float32)
        for kind in kinds:
            if state.get(kind) is None:  # SGD without a step so far has an entry of None
                state[kind] = new_state(kind, parameter)
                if kind == "momentum_buffer":  # torch copies the first gradient: -0.0 is what changes no number
                    state[kind].neg_()
            tensors[f"{kind}:{name}"] = state[kind]
    return OptimizerState(optimizer, update, trained, tensors, members, first)
