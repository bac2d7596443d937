"""From a captured step to one without in-place operators and with few kinds of operators, as an FX graph.

ONNX has neither memory that is written twice nor views, and no gradients: what the captured step writes to weights,
statistics and optimizer state becomes further outputs, and backward operators become those of forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from magis.aten import optimizers
from magis.aten.call import outputs, resolve, to_torch
from magis.capture.step import Captured
from magis.errors import UsageError
from magis.ir import GENERATOR, Graph
from magis.strategies.ort.forms import FORMS

__all__ = ["NEW", "Traced", "trace"]

NEW = "new:"
"""Outputs that are the new values of an input have its name with this in front."""

_NORMS = ("aten.native_layer_norm.default", "aten.native_batch_norm.default", "aten.native_group_norm.default")
_LEGIT = "aten._native_batch_norm_legit.default"


@dataclass(frozen=True, eq=False)
class Traced:
    """A step as a pure function of its inputs and of named numbers that change from step to step."""

    module: GraphModule
    """Takes the tensors of ``inputs``; returns those of ``outputs``."""
    inputs: tuple[str, ...]
    """As in the captured graph: "parameter:layer.weight", "state:exp_avg:layer.weight", "input:0"."""
    outputs: tuple[str, ...]
    """ "output:0" (the loss), then what the step has changed: "new:parameter:layer.weight"."""
    constants: Mapping[str, tuple[complex, ...]]
    """Data of those inputs that never change, in row-major order."""
    scalars: Mapping[float, str]
    """The numbers that stand in the graph for named ones: number -> name."""


def trace(captured: Captured) -> Traced:
    """The step without in-place operators. UsageError where inputs that it writes lie in memory of other inputs."""
    graph = captured.graph
    marks = optimizers.sentinels(captured.rule)
    values = [graph.values[value] for value in graph.inputs]
    names = tuple(value.name or f"constant:{value.id}" for value in values)
    written = {storage for op in graph.ops for storage, _ in op.writes} - {GENERATOR}
    changed = [index for index, value in enumerate(values) if value.storage in written]
    _check_alone([value.storage for value in values], names, changed)

    def step(*given: Tensor) -> tuple[Tensor, ...]:
        # written memory must not be that of the arguments: functionalization would write the result back
        tensors = [tensor.clone() if index in set(changed) else tensor for index, tensor in enumerate(given)]
        made = _run(graph, tensors, marks.numbers)
        return (*made, *(tensors[index] for index in changed))

    mode = FakeTensorMode()
    with mode, torch.no_grad():
        examples = [
            torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype)) for value in values
        ]
        functional: Callable[..., Any] = torch.func.functionalize(step, remove="mutations")
        module = make_fx(functional, decomposition_table={**core_aten_decompositions(), **FORMS})(*examples)
    module.graph.eliminate_dead_code()
    returned = (*(f"output:{index}" for index in range(len(graph.outputs))), *(NEW + names[index] for index in changed))
    constants = {names[graph.inputs.index(value)]: data for value, data in graph.constants.items()}
    return Traced(module, names, returned, constants, marks.names)


def _check_alone(storages: list[int], names: tuple[str, ...], changed: list[int]) -> None:
    for index in changed:
        shared = [name for name, storage in zip(names, storages, strict=True) if storage == storages[index]]
        if len(shared) > 1:
            raise UsageError(
                f"ONNX Runtime cannot update {' and '.join(shared)} in the memory that they share",
                hint="give each tensor memory of its own, or leave out the strategy ort",
            )


def _run(graph: Graph, inputs: list[Tensor], numbers: Mapping[str, float]) -> list[Tensor]:
    """The operators of the graph, one after another, their results in the types that the graph says."""
    tensors: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for op in graph.ops:
        args = [to_torch(arg, tensors, numbers) for arg in op.args]
        kwargs = {name: to_torch(arg, tensors, numbers) for name, arg in op.kwargs}
        target = op.target
        if target in _NORMS and args[0].dtype in (torch.float16, torch.bfloat16):
            # kernels keep the statistics of half-precision inputs in float32, torch's functions for fakes do not
            args[0] = args[0].float()
        if target == "aten.native_batch_norm.default" and args[3] is not None:
            target = _LEGIT  # the same call; this one says what it writes
        found = outputs(resolve(target)(*args, **kwargs))
        for value, made in zip(op.outputs, found, strict=True):
            if value is not None and made is not None:
                dtype = getattr(torch, graph.values[value].dtype)
                tensors[value] = made if made.dtype == dtype else made.to(dtype)
    return [tensors[value] for value in graph.outputs]
