"""Placeholder memory under a module's own tensors while a step is captured. Parameters and buffers stay the same Python
objects, wherever module, hooks or closures hold them; only their data is exchanged, and restored afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from magis.capture.python_state import CACHED, cached_memory
from magis.capture.workload import batch_by_name
from magis.errors import CaptureError
from magis.ops.python_objects import find

Twins = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Makes placeholders for tensors, by name, that share storages where the tensors do."""


@dataclass(frozen=True, eq=False)
class StandIns:
    """A module whose tensors have placeholder memory, and the placeholders of its batch."""

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    owners: Mapping[int, str]
    """Names of the tensors whose data was exchanged, by the address of the original storage."""

    def named(self) -> dict[str, Tensor]:
        """Return all tensors that exist before the step, by their names in its graph."""
        parameters = {f"parameter:{name}": tensor for name, tensor in self.parameters.items()}
        buffers = {f"buffer:{name}": tensor for name, tensor in self.buffers.items()}
        return {**parameters, **buffers, **batch_by_name(self.inputs, self.targets)}


@contextmanager
def stand_ins(
    module: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], trained: Sequence[str], twins: Twins
) -> Iterator[StandIns]:
    """Exchange the module's data for that of `twins`; gradients are None, and only parameters in `trained` require one.
    A module of fake tensors, whose data cannot be exchanged, is copied."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    originals = StandIns(module, parameters, buffers, tuple(inputs), tuple(targets), {}).named()
    made = twins(originals)
    owners = {data.untyped_storage()._cdata: name for name, data in originals.items()}
    plain: dict[int, Any] = {}  # deepcopy's memo for fake tensors, so that ties stay
    for tensor in (*parameters.values(), *buffers.values()):
        if isinstance(tensor.data, FakeTensor):
            empty = torch.empty(0, dtype=tensor.dtype)
            kept = isinstance(tensor, nn.Parameter)
            plain[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if kept else empty
    module = copy.deepcopy(module, plain) if plain else module
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    given = tuple(made[f"input:{index}"] for index in range(len(inputs)))
    wanted = tuple(made[f"target:{index}"] for index in range(len(targets)))
    before = [(tensor, tensor.data, tensor.requires_grad) for tensor in (*parameters.values(), *buffers.values())]
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    try:
        for name, parameter in parameters.items():
            parameter.grad = None
            parameter.data = made[f"parameter:{name}"]
            parameter.requires_grad_(name in trained)
        for name, buffer in buffers.items():
            buffer.data = made[f"buffer:{name}"]
        yield StandIns(module, parameters, buffers, given, wanted, owners)
    finally:
        for parameter, _ in gradients:
            parameter.grad = None
        for tensor, data, required in before:
            tensor.data = data
            tensor.requires_grad_(required)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def finder(
    stand: StandIns, loss_fn: Callable[..., Tensor] | None, cached: dict[str, Tensor]
) -> Callable[[Tensor], str | None]:
    """Return a function that names a tensor by the path at which module, loss or a cache holds it; fills `cached`."""
    roots = {"module": stand.module, "loss": loss_fn}

    def found(tensor: Tensor) -> str | None:
        owner = stand.owners.get(tensor.untyped_storage()._cdata)
        if owner is not None:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} that looks at the memory of {owner} is used past the module",
                hint="make the view in the forward, or register it as a buffer",
            )
        name = find(roots, tensor)
        if name is None and tensor.untyped_storage()._cdata in cached_memory():
            name = f"{CACHED}{len(cached)}"
            cached[name] = tensor.detach()
        return name

    return found
