"""Optimizers whose own code is part of a planned step, one parameter at a time: their update, and their state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture.one_by_one import CapturedUpdate, OneByOneError, told, updates_one_by_one
from magis.capture.optimizer_rule import Apart, Update, fingerprint, step_apart
from magis.cost.cost_model import RooflineCosts, device_model
from magis.frontends.optimizer_state import carried
from magis.graph import every_op
from magis.ops.optimizers import OptimizerSpec
from magis.ops.own_updates import OneByOne, OwnUpdate, StateTensor, grouped, state_places
from magis.runtime.scratch import measure_workspaces, packed_by
from magis.runtime.swap_streams import is_on_host, on_host
from magis.simulate.simulator import replay, rounded

Facts = Mapping[int, tuple[tuple[StateTensor, ...], int, int, bool]]
"""State, scratch bytes, nanoseconds and writes to the gradient of each parameter's update, by `id`."""


@dataclass(eq=False)
class OwnCodes:
    """The update by an optimizer's own code, examined again when its groups or the layout of its state change."""

    device: str
    _known: tuple[Any, Facts] | None = None
    _counts: bool = False

    def update(self, optimizer: Optimizer, trained: Mapping[str, nn.Parameter], *, whole: bool = False) -> Update:
        """Return the update of an optimizer by its own code; with eager's `whole` step, captured.

        Raises OneByOneError if it cannot run on one parameter at a time."""
        now = fingerprint(optimizer), _layouts(optimizer)
        if self._known is None or self._known[0] != now:
            found = updates_one_by_one(optimizer, tuple(trained.values()), self.device)
            self._counts = any(each.counts for each in found.values())
            self._known = now, _priced(found, self.device)
        facts = self._known[1]
        updates = tuple(OwnUpdate(name, *facts[id(each)]) for name, each in trained.items())
        eager = step_apart(optimizer, trained, self.device) if whole else None
        return Update(OptimizerSpec("own", updates=updates, whole=eager), ())

    def coupling(self, optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
        """Examine the code in the optimizer's present state, which may have counted to another branch; return why it
        cannot run on one parameter at a time, "" if it can."""
        try:
            updates_one_by_one(optimizer, tuple(trained.values()), self.device)
        except OneByOneError as error:
            self._known = None  # the next step decides anew
            return str(error)
        return ""

    def misses(self, optimizer: Optimizer, graded: Collection[int]) -> bool:
        """Return True if the optimizer counts in a group without any of the parameters with a gradient (by `id`)."""
        return self._counts and len(grouped(optimizer, graded)) < len(optimizer.param_groups)


def _layouts(optimizer: Optimizer) -> list[Any]:
    """Return paths and layouts of the tensors that an optimizer keeps."""
    every = (each for group in optimizer.param_groups for each in group["params"])
    kept = ((path, holder[key]) for each in every for path, holder, key in state_places(optimizer.state.get(each, {})))
    return [(path, *told(tensor)[:3]) for path, tensor in kept]


def _priced(found: Mapping[int, CapturedUpdate], device: str) -> Facts:
    """Return the state of each parameter, and what its update costs on the device, measured on a CPU."""
    known: dict[str, int] = {}
    for graph in {id(each.step): each.step.graph for each in found.values()}.values() if device == "cpu" else ():
        known.update(measure_workspaces([*every_op(graph)], None, packed_by(graph)))
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    costs = device_model(device, gpu=gpu, workspaces=known)
    priced = {id(each.step): _price(each.step, costs) for each in found.values()}
    return {number: (each.state, *priced[id(each.step)], each.in_gradient) for number, each in found.items()}


def _price(apart: Apart, costs: RooflineCosts) -> tuple[int, int]:
    """Return the peak bytes of a captured update's temporaries, and its nanoseconds."""
    graph = apart.graph
    stays = sum(rounded(each.nbytes, costs.rounding) for each in graph.storages.values() if each.persistent)
    peak = replay(graph, costs.workspace, deaths=apart.deaths, rounding=costs.rounding).peak_bytes
    return peak - stays, sum(costs.nanoseconds(op, graph.values) for op in graph.ops)


@dataclass(eq=False)
class OwnState:
    """The state tensors of an optimizer whose own code updates `trained` parameters, by their names in the graph
    ("exp_avg:layer.weight"). What its first step will make is on the device "meta" until then."""

    optimizer: Optimizer
    update: Update
    trained: Mapping[str, nn.Parameter]
    moved: Collection[str] = ()
    """Names of tensors that are in host memory between updates."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    is_new: bool = False
    """True if the last step has made state."""
    left: tuple[Any, ...] = ()
    """The optimizer's fingerprint after the last step, which may count in its groups."""

    def __post_init__(self) -> None:
        self._updates = {each.name: each for each in self.update.spec.updates if each.name in self.trained}
        self._adopt()
        hosted = {name: self.tensors[name] for name in self.moved}
        self.code = OneByOne(self.optimizer, self._updates, self.trained, hosted)

    def is_current(self) -> bool:
        """Return True if the optimizer still holds these tensors (`load_state_dict` replaces them)."""
        live = {name: tensor for name, tensor in self.tensors.items() if tensor.device.type != "meta"}
        held = {f"{path}:{name}": holder[key] for name, path, holder, key in self._places()}
        return all(held.get(name, tensor) is tensor for name, tensor in live.items())

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The state that is there, by the names of the graph's inputs."""
        return {f"state:{name}": tensor for name, tensor in self.tensors.items() if tensor.device.type != "meta"}

    @contextmanager
    def step_to_come(self) -> Iterator[Mapping[str, float]]:
        """Yield the named scalars of the next step, none; after it, take the state that it has made."""
        self.code.begin()
        known = len(self.optimizer.state)
        yield {}
        self.code.finish()
        self.left = fingerprint(self.optimizer)
        if len(self.optimizer.state) > known:
            self._in_order()
        self.is_new = len(self.inputs) < len(self.tensors)
        if self.is_new:
            self._adopt()

    def forget(self) -> None:
        """Nothing was made ahead of the step."""

    def _places(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield name, path, container and key of every tensor that the optimizer keeps."""
        for name, parameter in self.trained.items():
            for path, holder, key in state_places(self.optimizer.state.get(parameter, {})):
                yield name, path, holder, key

    def _adopt(self) -> None:
        """Take the optimizer's state tensors, those that are moved in host memory; leave room for missing ones."""
        held = {f"{path}:{name}": (holder, key) for name, path, holder, key in self._places()}
        for name, parameter in self.trained.items():
            for each in self._updates[name].state:
                full = f"{each.path}:{name}"
                to_host = full in self.moved
                holder, key = held.get(full, ({}, ""))
                if key != "" and each.fits(holder[key]):
                    if to_host != is_on_host(holder[key], parameter.device):
                        holder[key] = carried(holder[key], parameter, to_host=to_host)
                    self.tensors[full] = holder[key]
                elif full not in self.tensors:
                    made = each.empty(parameter.device if to_host else "meta")
                    self.tensors[full] = on_host(made, parameter.device) if to_host else made

    def _in_order(self) -> None:
        """Order the state by parameters, as a step of the whole optimizer makes it."""
        state = self.optimizer.state
        mine = [each for group in self.optimizer.param_groups for each in group["params"] if each in state]
        for parameter, entries in [(each, state.pop(each)) for each in mine]:
            state[parameter] = entries
