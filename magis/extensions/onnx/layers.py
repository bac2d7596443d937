"""ONNX forms of layers: matrix products, convolutions, pooling, norms, interpolation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.fx import Node

from magis.errors import UsageError
from magis.extensions.onnx.onnx_operators import Operator, by_operator, first_of, in_float, kind_of
from magis.extensions.onnx.writer import Made, Writer, value_of


def _product(writer: Writer, node: Node) -> Made:
    return writer.emit("MatMul", *(writer.tensor(arg, value_of(node).dtype) for arg in node.args))


def _addmm(writer: Writer, node: Node) -> Made:
    bias, first, second = node.args[:3]
    alpha, beta = (float(cast("float", node.kwargs.get(key, 1))) for key in ("alpha", "beta"))
    names = [writer.tensor(arg, value_of(node).dtype) for arg in (first, second, bias)]
    return writer.emit("Gemm", *names, alpha=alpha, beta=beta)


def _convolution(writer: Writer, node: Node) -> Made:
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = node.args
    dims = value_of(node).dim() - 2
    return writer.emit(
        "ConvTranspose" if transposed else "Conv",
        *(writer.tensor(arg) for arg in (x, weight, bias) if arg is not None),
        strides=_each(stride, dims),
        pads=_each(padding, dims) * 2,
        dilations=_each(dilation, dims),
        group=groups,
        output_padding=_each(extra, dims) if transposed else None,
    )


def _each(numbers: Any, dims: int = 2) -> list[int]:
    """Return one number per dimension; a single number is repeated."""
    found = list(numbers) if isinstance(numbers, Sequence) else [numbers]
    return found * dims if len(found) == 1 else found


def _pool_attributes(kernel: Any, stride: Any, padding: Any, ceil: object) -> dict[str, Any]:
    """Return ONNX's attributes of a pooling operator."""
    sizes = {"kernel_shape": _each(kernel), "strides": _each(stride or kernel), "pads": _each(padding) * 2}
    return {**sizes, "ceil_mode": int(bool(ceil))}


def _max_pool(writer: Writer, node: Node) -> Made:
    """Emit MaxPool; its indices refer to the flattened tensor, while torch's refer to each plane."""
    given: list[Any] = [*node.args, *([], 0, 1, False)[len(node.args) - 2 :]]
    x, kernel, stride, padding, dilation, ceil = given
    how = _pool_attributes(kernel, stride, padding, ceil)
    return writer.emit_several("MaxPool", writer.tensor(x), **how, dilations=_each(dilation), outputs=2)


def _max_pool_backward(writer: Writer, node: Node) -> Made:
    """Emit the scatter-add of the gradients at the indices of `_max_pool`."""
    out = value_of(node)
    summed = in_float(out.dtype)
    whole = writer.tensor(node.args[0], summed), writer.tensor(node.args[-1])
    gradient, positions = (writer.emit("Reshape", name, writer.ints([-1])) for name in whole)
    zeros = writer.emit("Expand", writer.number(0, summed), writer.ints([out.numel()]))
    sums = writer.emit("ScatterElements", zeros, positions, gradient, axis=0, reduction="add")
    return writer.cast(writer.emit("Reshape", sums, writer.ints(out.shape)), summed, out.dtype)


def _average_pool(writer: Writer, node: Node) -> Made:
    given: list[Any] = [*node.args, *([], [], 0, False, True, None)[len(node.args) - 1 :]]
    x, kernel, stride, padding, ceil, count_padding, divisor = given
    if divisor is not None:
        raise UsageError("ONNX Runtime cannot run avg_pool2d with a divisor of its own", hint="leave out ort")
    how = _pool_attributes(kernel, stride, padding, ceil)
    return writer.emit("AveragePool", writer.tensor(x), **how, count_include_pad=int(bool(count_padding)))


def _layer_norm(writer: Writer, node: Node) -> Made:
    """Emit LayerNormalization and return output, mean and 1 / deviation, computed in float32 as in torch's kernels."""
    x, sizes, weight, bias, eps = cast("Any", node.args)
    outs: Any = node.meta["val"]
    dtype = in_float(outs[0].dtype)
    scale = writer.array(np.ones(sizes, dtype=kind_of(dtype))) if weight is None else writer.tensor(weight, dtype)
    names = [writer.tensor(x, dtype), scale] + ([] if bias is None else [writer.tensor(bias, dtype)])
    axis = outs[0].dim() - len(sizes)
    made = writer.emit_several("LayerNormalization", *names, axis=axis, epsilon=eps, outputs=3)
    return tuple(writer.cast(each, dtype, out.dtype) for each, out in zip(made, outs, strict=True))


def _bilinear(writer: Writer, node: Node) -> Made:
    """Emit bilinear interpolation as two matrix products, since it is linear along each dimension."""
    small, large = first_of(node).shape, value_of(node).shape
    rows, columns = (_weights(small[i], large[i], bool(node.args[2])) for i in (2, 3))
    return _between(writer, node, rows, columns.T)


def _bilinear_backward(writer: Writer, node: Node) -> Made:
    small, large = value_of(node).shape, first_of(node).shape
    rows, columns = (_weights(small[i], large[i], bool(node.args[3])) for i in (2, 3))
    return _between(writer, node, rows.T, columns)


def _between(writer: Writer, node: Node, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> str:
    dtype = value_of(node).dtype
    first, last = (
        writer.cast(writer.array(np.ascontiguousarray(each)), torch.float32, dtype) for each in (left, right)
    )
    return writer.emit("MatMul", writer.emit("MatMul", first, writer.tensor(node.args[0], dtype)), last)


def _weights(inputs: int, outputs: int, corners: bool) -> np.ndarray[Any, Any]:
    """Return the weight of each input in each output, [outputs, inputs], from torch's interpolation of unit vectors."""
    unit = torch.eye(inputs).view(1, inputs, inputs, 1)
    with torch.no_grad():
        found = torch.nn.functional.interpolate(unit, (outputs, 1), mode="bilinear", align_corners=corners)
    columns: np.ndarray[Any, Any] = found[0, :, :, 0].T.contiguous().numpy()
    return columns


LAYERS: Mapping[Any, Operator] = by_operator(
    {
        "mm.default bmm.default": _product,
        "addmm.default": _addmm,
        "convolution.default": _convolution,
        "max_pool2d_with_indices.default": _max_pool,
        "max_pool2d_with_indices_backward.default": _max_pool_backward,
        "avg_pool2d.default": _average_pool,
        "native_layer_norm.default": _layer_norm,
        "upsample_bilinear2d.default": _bilinear,
        "upsample_bilinear2d_backward.default": _bilinear_backward,
    }
)
"""Functions that write ONNX forms, by ATen operator."""
