"""One parameter's update by an optimizer's own code, as one operator of a step.

    magis.own_update(%weight, %gradient, [%exp_avg, ...], name="layer.weight", scratch=4096, ns=800)

runs `step()` of the user's optimizer on one parameter: whatever that computes, in Python or in kernels, is what eager
computes, if the optimizer treats each of its parameters by itself (`magis.capture.one_by_one` finds that out). A graph
knows the memory of such a call: the state that stays, and the bytes that the call takes beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

OWN_UPDATES = ("magis.own_update.default", "magis.own_update.in_gradient")
"""Operators of such updates; the second one writes to the gradient, too."""
_LIBRARY = torch.library.Library("magis", "FRAGMENT")
for _overload, _gradient in (("", "Tensor"), (".in_gradient", "Tensor(c!)")):
    _given = f"Tensor(a!) weight, {_gradient} gradient, Tensor(b!)[] state, *, str name, int scratch, int ns"
    _LIBRARY.define(f"own_update{_overload}({_given}) -> ()")
    for _device in ("Meta", "CPU", "CUDA"):  # a step that trains calls `OneByOne.update` in its place
        _LIBRARY.impl(f"own_update{_overload}", lambda *_, **__: None, _device)


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for one parameter: path in its state ("exp_avg"), and layout."""

    path: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype), device=device)

    def fits(self, tensor: Tensor) -> bool:
        """Return True if a tensor has this layout."""
        looks = tuple(tensor.shape), tensor.stride(), tensor.dtype
        return type(tensor) is Tensor and looks == (self.shape, self.stride, getattr(torch, self.dtype))


@dataclass(frozen=True)
class OwnUpdate:
    """The memory and time of one parameter's update by the optimizer's own code."""

    name: str
    """Name of the parameter in the module."""
    state: tuple[StateTensor, ...]
    scratch: int
    """Peak bytes of temporaries."""
    ns: int
    in_gradient: bool
    """True if the update writes to the gradient."""

    def record(self, weight: Tensor, gradient: Tensor, state: Sequence[Tensor]) -> None:
        """Call the operator, for a recorder."""
        call = torch.ops.magis.own_update.in_gradient if self.in_gradient else torch.ops.magis.own_update.default
        call(weight, gradient, state, name=self.name, scratch=self.scratch, ns=self.ns)


def state_places(entries: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, container and key of each tensor in nested dictionaries and lists."""
    parts = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
    for key, part in parts:
        here = f"{path}.{key}" if path else f"{key}"
        if isinstance(part, Tensor):
            yield here, entries, key
        elif isinstance(part, (Mapping, list, tuple)):
            yield from state_places(part, here)


def view_of(optimizer: Optimizer, parameters: Mapping[int, Sequence[Tensor]]) -> Optimizer:
    """Return an optimizer with some of another one's parameters, by index of their group, with its state and copies of
    its groups' numbers."""
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})  # a scheduler's patch
    made.param_groups = [{**optimizer.param_groups[home], "params": [*some]} for home, some in parameters.items()]
    return made


def grouped(optimizer: Optimizer, parameters: Collection[int]) -> dict[int, list[Tensor]]:
    """Return some parameters of an optimizer (by `id`) by the index of their group."""
    groups = enumerate(optimizer.param_groups)
    found = {home: [each for each in group["params"] if id(each) in parameters] for home, group in groups}
    return {home: some for home, some in found.items() if some}


def leave_numbers(optimizer: Optimizer, view: Optimizer, homes: Iterable[int]) -> None:
    """Store in an optimizer what the step of a view has assigned to attributes and in groups, whose indices are
    `homes`."""
    for home, group in zip(homes, view.param_groups, strict=True):
        own = optimizer.param_groups[home]
        own.update({name: value for name, value in group.items() if name != "params" and own.get(name) is not value})
    own = vars(optimizer)
    changed = {name: value for name, value in vars(view).items() if name not in own or own[name] is not value}
    own.update({name: value for name, value in changed.items() if name != "param_groups"})


class OneByOne:
    """An optimizer whose own code updates one parameter at a time within a step. ``hosted`` is its state that is in
    host memory between updates, by path and parameter ("exp_avg:layer.weight")."""

    def __init__(
        self,
        optimizer: Optimizer,
        updates: Mapping[str, OwnUpdate],
        parameters: Mapping[str, Tensor],
        hosted: Mapping[str, Tensor],
    ) -> None:
        self._optimizer, self._updates, self._parameters, self._hosted = optimizer, updates, parameters, hosted
        self._views: list[tuple[Optimizer, int]] = []
        self._homes: dict[int, int] = {}
        self._outside: tuple[Any, ...] = ()

    def update(self, _weight: Tensor, gradient: Tensor, state: Sequence[Tensor], *, name: str, **_costs: int) -> None:
        """Run the optimizer's step on one parameter; `state` are its tensors within this step, copies of the
        optimizer's where these are in host memory."""
        parameter = self._parameters[name]
        home = self._homes[id(parameter)]
        view = view_of(self._optimizer, {home: (parameter,)})
        named = zip(self._updates[name].state, state, strict=True)
        given = {each.path: tensor for each, tensor in named if f"{each.path}:{name}" in self._hosted}
        for path, holder, key in [*state_places(self._optimizer.state.get(parameter, {}))] if given else ():
            if path in given:
                holder[key] = given[path]
        parameter.grad = gradient
        try:
            with torch._C._ForceDispatchKeyGuard(*self._outside), torch.enable_grad():  # as where a loop calls it
                view.step()
        finally:
            parameter.grad = None
            for path, holder, key in [*state_places(self._optimizer.state.get(parameter, {}))] if given else ():
                if path in given and holder[key] is not given[path]:  # its first step
                    given[path].copy_(holder[key])
                if path in given:
                    holder[key] = self._hosted[f"{path}:{name}"]
        self._views.append((view, home))

    def begin(self) -> None:
        """Prepare a step: forget the updates of one that raised, and look where the parameters are now."""
        self._views.clear()
        groups = enumerate(self._optimizer.param_groups)
        self._homes = {id(each): home for home, group in groups for each in group["params"]}
        self._outside = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def finish(self) -> None:
        """Store what the updates of a step have assigned to the optimizer's attributes and groups."""
        for view, home in self._views:
            leave_numbers(self._optimizer, view, (home,))
        self._views.clear()
