"""ONNX forms of the operators behind layers: products, convolutions, pooling, norms, interpolation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from magis.errors import UsageError
from magis.strategies.ort.onnx_operators import Operator, in_float
from magis.strategies.ort.writer import Made, Writer, value_of


def _product(writer: Writer, node: Node) -> Made:
    dtype = value_of(node).dtype
    return writer.emit("MatMul", *(writer.tensor(arg, dtype) for arg in node.args))  # type: ignore[no-any-return]


def _addmm(writer: Writer, node: Node) -> Made:
    bias, first, second = node.args[:3]
    alpha, beta = (float(node.kwargs.get(key, 1)) for key in ("alpha", "beta"))  # type: ignore[arg-type]
    dtype = value_of(node).dtype
    names = [writer.tensor(arg, dtype) for arg in (first, second, bias)]
    return writer.emit("Gemm", *names, alpha=alpha, beta=beta)  # type: ignore[no-any-return]


def _convolution(writer: Writer, node: Node) -> Made:
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = node.args
    dims = value_of(node).dim() - 2
    names = [writer.tensor(arg) for arg in (x, weight, bias) if arg is not None]
    return writer.emit(  # type: ignore[no-any-return]
        "ConvTranspose" if transposed else "Conv",
        *names,
        strides=_each(stride, dims),
        pads=_each(padding, dims) * 2,
        dilations=_each(dilation, dims),
        group=groups,
        output_padding=_each(extra, dims) if transposed else None,
    )


def _each(numbers: Any, dims: int) -> list[int]:
    """One number for every dimension."""
    found = list(numbers) if isinstance(numbers, Sequence) else [numbers]
    return found * dims if len(found) == 1 else found


def _max_pool(writer: Writer, node: Node) -> Made:
    """Values, and their positions counted through the whole tensor, where torch counts within each plane."""
    given: list[Any] = [*node.args[1:], *([], 0, 1, False)[len(node.args) - 2 :]]
    kernel, stride, padding, dilation, ceil = given
    made: tuple[str, str] = writer.emit(
        "MaxPool",
        writer.tensor(node.args[0]),
        kernel_shape=_each(kernel, 2),
        strides=_each(stride or kernel, 2),
        pads=_each(padding, 2) * 2,
        dilations=_each(dilation, 2),
        ceil_mode=int(bool(ceil)),
        outputs=2,
    )
    return made


def _max_pool_backward(writer: Writer, node: Node) -> Made:
    """Sums of the gradients over the positions that `_max_pool` found."""
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
    return writer.emit(  # type: ignore[no-any-return]
        "AveragePool",
        writer.tensor(x),
        kernel_shape=_each(kernel, 2),
        strides=_each(stride or kernel, 2),
        pads=_each(padding, 2) * 2,
        ceil_mode=int(bool(ceil)),
        count_include_pad=int(bool(count_padding)),
    )


def _layer_norm(writer: Writer, node: Node) -> Made:
    """Output, mean and 1 / deviation; computed in float32, as torch's kernels do."""
    x, shape, weight, bias, eps = node.args
    outs: Any = node.meta["val"]
    sizes: Any = shape
    dtype = in_float(outs[0].dtype)
    kind = str(dtype).removeprefix("torch.")
    scale = writer.array(np.ones(sizes, dtype=kind)) if weight is None else writer.tensor(weight, dtype)
    names = [writer.tensor(x, dtype), scale] + ([] if bias is None else [writer.tensor(bias, dtype)])
    axis = outs[0].dim() - len(sizes)
    made = writer.emit("LayerNormalization", *names, axis=axis, epsilon=eps, outputs=3)
    return tuple(writer.cast(each, dtype, out.dtype) for each, out in zip(made, outs, strict=True))


def _bilinear(writer: Writer, node: Node) -> Made:
    """Interpolation is linear along each dimension: a matrix from the left, another one from the right."""
    out, x = value_of(node), value_of(node.args[0])  # type: ignore[arg-type]
    return _between(writer, node, x.shape, out.shape, bool(node.args[2]), transposed=False)


def _bilinear_backward(writer: Writer, node: Node) -> Made:
    out, gradient = value_of(node), value_of(node.args[0])  # type: ignore[arg-type]
    corners = bool(node.args[3])
    return _between(writer, node, out.shape, gradient.shape, corners, transposed=True)


def _between(
    writer: Writer, node: Node, small: Sequence[int], large: Sequence[int], corners: bool, *, transposed: bool
) -> str:
    rows, columns = (_weights(small[i], large[i], corners) for i in (2, 3))
    left, right = (rows.T, columns) if transposed else (rows, columns.T)
    dtype = value_of(node).dtype
    first, last = (
        writer.cast(writer.array(np.ascontiguousarray(each)), torch.float32, dtype) for each in (left, right)
    )
    made: str = writer.emit("MatMul", first, writer.tensor(node.args[0], dtype))
    return writer.emit("MatMul", made, last)  # type: ignore[no-any-return]


def _weights(inputs: int, outputs: int, corners: bool) -> np.ndarray[Any, Any]:
    """[outputs, inputs]: how much of each input is in each output, by torch's own interpolation of unit vectors."""
    unit = torch.eye(inputs).view(1, inputs, inputs, 1)
    with torch.no_grad():
        found = torch.nn.functional.interpolate(unit, (outputs, 1), mode="bilinear", align_corners=corners)
    columns: np.ndarray[Any, Any] = found[0, :, :, 0].T.contiguous().numpy()
    return columns


_aten: Any = torch.ops.aten

LAYERS: Mapping[Any, Operator] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _addmm,
    _aten.convolution.default: _convolution,
    _aten.max_pool2d_with_indices.default: _max_pool,
    _aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    _aten.avg_pool2d.default: _average_pool,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.upsample_bilinear2d.default: _bilinear,
    _aten.upsample_bilinear2d_backward.default: _bilinear_backward,
}
"""Operator -> what writes it."""
