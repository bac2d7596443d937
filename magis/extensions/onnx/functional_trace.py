"""Trace of a captured step as an FX graph without in-place operators and with few kinds of operators.

ONNX has no in-place writes, no views and no gradients: in-place writes to weights, statistics and optimizer state
become extra outputs, and backward operators are decomposed into forward operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from magis.capture.captured import Captured
from magis.errors import UsageError
from magis.graph import GENERATOR, Graph, Scalar
from magis.ops import optimizers
from magis.ops.call import outputs, resolve, to_torch

# Decompositions into operators with an ONNX form, where torch's own decompositions do not go that far.

_aten: Any = torch.ops.aten


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Interpolate by the formula that torch's kernel selects; torch's decomposition computes both formulas."""
    if abs(weight) < 0.5:
        return start + (end - start) * weight
    return end - (end - start) * (1 - weight)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a softmax that is 0 in rows that are completely masked, that is, whose maximum is -inf."""
    x = x if dtype is None else x.to(dtype)
    masked = x.amax(dim, keepdim=True) == -torch.inf
    return torch.where(masked, 0.0, torch.softmax(x, dim))


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output, saved mean and 1 / deviation, and both updated statistics; ONNX's own operator updates the running
    variance with the biased variance."""
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    dtype, x = x.dtype, x.to(running_mean.dtype)  # statistics stay in float32 under autocast

    def wide(vector: Tensor) -> Tensor:
        return vector.view([1, -1, *[1] * (x.dim() - 2)])

    mean, variance = running_mean, running_var
    centered = x - wide(mean)
    if training:
        mean = x.mean(dims)
        centered = x - wide(mean)
        variance = (centered * centered).mean(dims)
        running_mean = running_mean * (1 - momentum) + mean * momentum
        running_var = running_var * (1 - momentum) + variance * (momentum * count / max(count - 1, 1))
    scale = torch.rsqrt(variance + eps)
    out = centered * wide(scale if weight is None else scale * weight)
    if bias is not None:
        out = out + wide(bias)
    empty = x.new_zeros(0)
    return out.to(dtype), (mean if training else empty), (scale if training else empty), running_mean, running_var


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,  # noqa: ARG001  (torch's signature)
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],  # noqa: ARG001
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias as convolutions.

    The input's gradient is a transposed convolution; for the weight's gradient, batch and channels are swapped, and
    strides become dilations.
    """
    dims = x.dim() - 2
    stride, padding, dilation = (list(each) * (dims if len(each) == 1 else 1) for each in (stride, padding, dilation))
    to_x = to_weight = to_bias = None
    if wanted[0]:
        # elements that the stride leaves over at the end still belong to the input
        missing = [
            0
            if transposed
            else x.shape[i + 2]
            - ((gradient.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[i + 2] - 1) + 1)
            for i in range(dims)
        ]
        to_x = _aten.convolution(gradient, weight, None, stride, padding, dilation, not transposed, missing, groups)
    if wanted[1]:
        if groups != 1:
            raise UsageError(
                f"ONNX Runtime cannot train a convolution of {groups} groups: the weight's gradient has no ONNX form",
                hint="leave out the strategy ort for this network",
            )
        wide, narrow = (gradient, x) if transposed else (x, gradient)
        found = _aten.convolution(
            wide.transpose(0, 1), narrow.transpose(0, 1), None, dilation, padding, stride, False, [0] * dims, 1
        )
        for i in range(dims):
            found = found.narrow(i + 2, 0, weight.shape[i + 2])
        to_weight = found.transpose(0, 1)
    if wanted[2]:
        to_bias = gradient.sum([0, *range(2, gradient.dim())])
    return to_x, to_weight, to_bias


FORMS: Mapping[Any, Callable[..., Any]] = {
    _aten.lerp.Scalar: _lerp,
    _aten._safe_softmax.default: _safe_softmax,
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten.convolution_backward.default: _convolution_backward,
}
"""Decompositions by operator, which take precedence over torch's core decompositions."""


NEW = "new:"
"""Prefix of outputs that are new values of inputs."""

_NORMS = ("aten.native_layer_norm.default", "aten.native_batch_norm.default", "aten.native_group_norm.default")
_LEGIT = "aten._native_batch_norm_legit.default"


@dataclass(frozen=True, eq=False)
class Traced:
    """Step as a pure function of its inputs and of named numbers that change from step to step."""

    module: GraphModule
    """FX module that maps the tensors of ``inputs`` to those of ``outputs``."""
    inputs: tuple[str, ...]
    """Input names as in the captured graph: "parameter:layer.weight", "state:exp_avg:layer.weight", "input:0"."""
    outputs: tuple[str, ...]
    """Output names: "output:0" (the loss), then new values of inputs, "new:parameter:layer.weight"."""
    constants: Mapping[str, tuple[complex | Scalar, ...]]
    """Data of constant inputs, in row-major order."""
    scalars: Mapping[float, str]
    """Placeholder number in the graph -> name of the scalar input that replaces it."""


def trace(captured: Captured) -> Traced:
    """Trace the step without in-place operators. Raises UsageError if a written input shares memory with another."""
    graph = captured.graph
    marks = optimizers.sentinels(captured.rule)
    values = [graph.values[value] for value in graph.inputs]
    names = tuple(value.name or f"constant:{value.id}" for value in values)
    written = {storage for op in graph.ops for storage, _ in op.writes} - {GENERATOR}
    changed = [index for index, value in enumerate(values) if value.storage in written]
    for index in changed:
        shared = [name for name, value in zip(names, values, strict=True) if value.storage == values[index].storage]
        if len(shared) > 1:
            raise UsageError(
                f"ONNX Runtime cannot update {' and '.join(shared)} in the memory that they share",
                hint="give each tensor memory of its own, or leave out the strategy ort",
            )

    def step(*given: Tensor) -> tuple[Tensor, ...]:
        # written memory must not be that of the arguments: functionalization would write the result back
        tensors = [tensor.clone() if index in set(changed) else tensor for index, tensor in enumerate(given)]
        made = _run_graph(graph, tensors, marks)
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
    return Traced(module, names, returned, constants, {number: name for name, number in marks.items()})


def _run_graph(graph: Graph, inputs: list[Tensor], numbers: Mapping[str, float]) -> list[Tensor]:
    """Run the operators of the graph, and cast their results to the data types in the graph."""
    tensors: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for op in graph.ops:
        args = [to_torch(arg, tensors, numbers) for arg in op.args]
        kwargs = {name: to_torch(arg, tensors, numbers) for name, arg in op.kwargs}
        target = op.target
        if target in _NORMS and args[0].dtype in (torch.float16, torch.bfloat16):
            # kernels keep the statistics of half-precision inputs in float32, torch's functions for fakes do not
            args[0] = args[0].float()
        if target == "aten.native_batch_norm.default" and args[3] is not None:
            target = _LEGIT  # an equivalent operator whose schema declares its writes
        found = outputs(resolve(target)(*args, **kwargs))
        for value, made in zip(op.outputs, found, strict=True):
            if value is not None and made is not None:
                dtype = getattr(torch, graph.values[value].dtype)
                tensors[value] = made if made.dtype == dtype else made.to(dtype)
    return [tensors[value] for value in graph.outputs]
