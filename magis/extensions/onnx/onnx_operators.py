"""ONNX forms (operator set 20) of the ATen operators of a traced step, one function or row each.

A form is called with the writer, the fake tensor of the result (or the tuple of several), and the ATen operator's own
arguments. torch.onnx.export and the forms of onnxscript's library are not used: docs/strategies.md says why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from magis.errors import UsageError
from magis.extensions.onnx.writer import ELEMENT, Fill, Made, Writer, value_of
from magis.ops.call import resolve

Form: TypeAlias = Callable[..., Made]
"""Function that writes the ONNX form of one FX node."""

# Element by element.


def _elementwise(kind: str, whole_numbers: str = "") -> Form:
    """Return the form of an element-wise operator; ``whole_numbers``: its kind for integers if ``kind`` is logical."""

    def write(writer: Writer, out: Tensor, *args: Any, alpha: float = 1) -> Made:
        names = writer.operands(args, [out.dtype] * len(args), out.shape)
        if alpha != 1:
            names[1] = writer.emit("Mul", names[1], writer.number(float(alpha), out.dtype))
        return writer.emit(whole_numbers if whole_numbers and out.dtype != torch.bool else kind, *names)

    return write


def _compared(kind: str, *, negated: bool = False) -> Form:
    def write(writer: Writer, out: Tensor, *args: Any) -> Made:
        dtype = torch.result_type(*(value_of(arg) if isinstance(arg, Node) else arg for arg in args))
        if dtype == torch.bool and kind != "Equal":
            dtype = torch.uint8
        made = writer.emit(kind, *writer.operands(args, [dtype] * 2, out.shape))
        return writer.emit("Not", made) if negated else made

    return write


def _rsqrt(writer: Writer, _out: Tensor, x: Node) -> Made:
    return writer.emit("Reciprocal", writer.emit("Sqrt", writer.tensor(x)))


def _where(writer: Writer, out: Tensor, *args: Any) -> Made:
    return writer.emit("Where", *writer.operands(args, [torch.bool, out.dtype, out.dtype], out.shape))


def _clamp(writer: Writer, out: Tensor, x: Node, low: Any = None, high: Any = None) -> Made:
    name = writer.tensor(x, out.dtype)
    for kind, bound in (("Max", low), ("Min", high)):
        if bound is not None:
            name = writer.emit(kind, name, writer.tensor(bound, out.dtype))
    return name


def _gelu(writer: Writer, _out: Tensor, x: Node, *, approximate: str = "none") -> Made:
    return writer.emit("Gelu", writer.tensor(x), approximate=approximate)


# Tensors out of nothing, and copies. Keywords name layouts and devices.


def _same(writer: Writer, _out: Any, x: Node, **_how: Any) -> Made:
    """Return the tensor itself, without a copy, since no value is written in-place."""
    return writer.made[x]


def _unless_filled(form: Form) -> Form:
    """Return the form of an operator that copies or moves elements, which leaves a filled tensor unchanged."""

    def write(writer: Writer, out: Tensor, x: Node, *args: Any, **kwargs: Any) -> Made:
        made = writer.made[x]
        return made if isinstance(made, Fill) else form(writer, out, x, *args, **kwargs)

    return write


@_unless_filled
def _to_copy(writer: Writer, out: Tensor, x: Node, **_how: Any) -> Made:
    return writer.tensor(x, out.dtype)


def _copy(writer: Writer, out: Tensor, _old: Node, new: Any, *_blocking: bool) -> Made:
    name = writer.tensor(new, out.dtype)
    same = isinstance(new, Node) and value_of(new).shape == out.shape
    return name if same else writer.emit("Expand", name, writer.ints(out.shape))


def _full(_writer: Writer, _out: Tensor, *args: Any, **_how: Any) -> Made:
    return Fill(args[-1])


def _empty(_writer: Writer, _out: Tensor, *_args: Any, **_how: Any) -> Made:
    """Return zeros for an uninitialized tensor."""
    return Fill(0)


def _arange(writer: Writer, out: Tensor, *ends: Any, **_how: Any) -> Made:
    return writer.array(np.arange(*ends), out.dtype)


def _drawn(writer: Writer, out: Tensor) -> str:
    """Draw float32 numbers, uniform between 0 and 1, from ONNX Runtime's own generator."""
    made = writer.emit("RandomUniform", shape=list(out.shape) or [1], dtype=ELEMENT[torch.float32])
    return made if out.dim() else writer.emit("Reshape", made, writer.ints([]))


def _random(writer: Writer, out: Tensor, *_args: Any, **_how: Any) -> Made:
    return writer.cast(_drawn(writer, out), torch.float32, out.dtype)


def _bernoulli(writer: Writer, out: Tensor, _x: Node, chance: float, **_how: Any) -> Made:
    number = writer.number(float(chance), torch.float32)
    return writer.cast(writer.emit("Less", _drawn(writer, out), number), torch.bool, out.dtype)


# Elements in other places.


def _shaped(kind: str) -> Form:
    return _unless_filled(
        lambda writer, out, x, *_args, **_how: writer.emit(kind, writer.tensor(x), writer.ints(out.shape))
    )


@_unless_filled
def _permute(writer: Writer, out: Tensor, x: Node, *dims: Any) -> Made:
    order = list(range(out.dim()))
    match dims:
        case ():  # t
            order.reverse()
        case (first, second):  # transpose
            order[first], order[second] = order[second], order[first]
        case (listed,):
            order = [order[dim] for dim in listed]
    return writer.emit("Transpose", writer.tensor(x), perm=order)


@_unless_filled
def _select(writer: Writer, _out: Tensor, x: Node, dim: int, index: int) -> Made:
    shape = value_of(x).shape
    position = writer.array(index % shape[dim], torch.int64)
    return writer.emit("Gather", writer.tensor(x), position, axis=dim % len(shape))


@_unless_filled
def _slice(
    writer: Writer, out: Tensor, x: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Made:
    shape = value_of(x).shape
    if shape == out.shape:
        return writer.made[x]
    numbers = (start or 0, shape[dim] if end is None else end, dim % len(shape), step)
    return writer.emit("Slice", writer.tensor(x), *(writer.ints([number]) for number in numbers))


def _split(writer: Writer, parts: Sequence[Tensor], x: Node, sizes: Sequence[int], dim: int = 0) -> Made:
    lengths, axis = writer.ints(sizes), dim % parts[0].dim()
    return writer.emit_several("Split", writer.tensor(x), lengths, axis=axis, outputs=len(parts))


def _getitem(writer: Writer, _out: Tensor, x: Node, index: int) -> Made:
    made: Any = writer.made[x]  # of an operator with several results
    return str(made[index])


def _cat(writer: Writer, out: Tensor, parts: Sequence[Node], dim: int = 0) -> Made:
    names = [writer.tensor(part, out.dtype) for part in parts if value_of(part).numel()]
    return writer.emit("Concat", *names, axis=dim % out.dim())


# Reductions and indices.


def _reduced(kind: str) -> Form:
    def write(writer: Writer, out: Tensor, x: Node, dims: Any = None, keep: bool = False, **_how: Any) -> Made:
        name, rank = writer.tensor(x, out.dtype), value_of(x).dim()
        if not rank:
            return name
        listed = [dims] if isinstance(dims, int) else dims or range(rank)
        return writer.emit(kind, name, writer.ints(dim % rank for dim in listed), keepdims=int(keep))

    return write


def _along(kind: str) -> Form:
    def write(writer: Writer, out: Tensor, x: Node, dim: int, *_half_to_float: bool) -> Made:
        return writer.emit(kind, writer.tensor(x, out.dtype), axis=dim % (out.dim() or 1))

    return write


def _in_float(dtype: torch.dtype) -> torch.dtype:
    """Return the data type for operators of which ONNX Runtime has no half-precision kernels, or imprecise ones."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _index_put(
    writer: Writer, out: Tensor, x: Node, given: Sequence[Node], values: Node, accumulate: bool = False
) -> Made:
    """Emit index_put(x, [index, ...], values, accumulate) as ScatterND."""
    indices = [writer.emit("Unsqueeze", writer.tensor(index, torch.int64), writer.ints([-1])) for index in given]
    if len(indices) > 1:
        indices = [writer.emit("Concat", *indices, axis=-1)]
    summed = _in_float(out.dtype)
    names = [writer.tensor(x, summed), indices[0], writer.tensor(values, summed)]
    return writer.cast(writer.emit("ScatterND", *names, reduction="add" if accumulate else "none"), summed, out.dtype)


def _embedding(writer: Writer, _out: Tensor, weight: Node, index: Node, *_how: Any) -> Made:
    return writer.emit("Gather", writer.tensor(weight), writer.tensor(index), axis=0)


def _gather(writer: Writer, _out: Tensor, x: Node, dim: int, index: Node, **_how: Any) -> Made:
    return writer.emit("GatherElements", writer.tensor(x), writer.tensor(index), axis=dim)


def _scatter(writer: Writer, out: Tensor, x: Node, dim: int, index: Node, given: Any) -> Made:
    source = writer.tensor(given, out.dtype)
    if not isinstance(given, Node):
        source = writer.emit("Expand", source, writer.ints(value_of(index).shape))
    return writer.emit("ScatterElements", writer.tensor(x), writer.tensor(index), source, axis=dim)


# Layers: matrix products, convolutions, pooling, norms, interpolation.


def _product(writer: Writer, out: Tensor, *args: Node) -> Made:
    return writer.emit("MatMul", *(writer.tensor(arg, out.dtype) for arg in args))


def _addmm(
    writer: Writer, out: Tensor, bias: Node, first: Node, second: Node, *, alpha: float = 1, beta: float = 1
) -> Made:
    names = [writer.tensor(arg, out.dtype) for arg in (first, second, bias)]
    return writer.emit("Gemm", *names, alpha=float(alpha), beta=float(beta))


def _convolution(
    writer: Writer, out: Tensor, x: Node, weight: Node, bias: Node | None,
    stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any, groups: int,
) -> Made:  # fmt: skip
    dims = out.dim() - 2
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


def _windows(kernel: Any, stride: Any, padding: Any, ceil: bool) -> dict[str, Any]:
    """Return the attributes that all poolings have."""
    return {
        "kernel_shape": _each(kernel),
        "strides": _each(stride or kernel),
        "pads": _each(padding) * 2,
        "ceil_mode": int(ceil),
    }


def _max_pool(
    writer: Writer, _outs: Any, x: Node, kernel: Any,
    stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False,
) -> Made:  # fmt: skip
    """Emit MaxPool; its indices refer to the flattened tensor, while torch's refer to each plane."""
    return writer.emit_several(
        "MaxPool",
        writer.tensor(x),
        **_windows(kernel, stride, padding, ceil),
        dilations=_each(dilation),
        outputs=2,
    )


def _max_pool_backward(writer: Writer, out: Tensor, gradient: Node, *args: Any) -> Made:
    """Emit the scatter-add of the gradients at the indices of `_max_pool`."""
    summed = _in_float(out.dtype)
    whole = writer.tensor(gradient, summed), writer.tensor(args[-1])
    flat, positions = (writer.emit("Reshape", name, writer.ints([-1])) for name in whole)
    zeros = writer.emit("Expand", writer.number(0, summed), writer.ints([out.numel()]))
    sums = writer.emit("ScatterElements", zeros, positions, flat, axis=0, reduction="add")
    return writer.cast(writer.emit("Reshape", sums, writer.ints(out.shape)), summed, out.dtype)


def _average_pool(
    writer: Writer, _out: Tensor, x: Node, kernel: Any,
    stride: Any = (), padding: Any = 0, ceil: bool = False, count_padding: bool = True, divisor: int | None = None,
) -> Made:  # fmt: skip
    if divisor is not None:
        raise UsageError("ONNX Runtime cannot run avg_pool2d with a divisor of its own", hint="leave out ort")
    return writer.emit(
        "AveragePool",
        writer.tensor(x),
        **_windows(kernel, stride, padding, ceil),
        count_include_pad=int(count_padding),
    )


def _layer_norm(
    writer: Writer, outs: Sequence[Tensor], x: Node,
    sizes: Sequence[int], weight: Node | None, bias: Node | None, eps: float,
) -> Made:  # fmt: skip
    """Emit LayerNormalization and return output, mean and 1 / deviation, computed in float32 as in torch's kernels."""
    dtype = _in_float(outs[0].dtype)
    scale = writer.array(np.ones(sizes), dtype) if weight is None else writer.tensor(weight, dtype)
    names = [writer.tensor(x, dtype), scale] + ([] if bias is None else [writer.tensor(bias, dtype)])
    axis = outs[0].dim() - len(sizes)
    made = writer.emit_several("LayerNormalization", *names, axis=axis, epsilon=eps, outputs=3)
    return tuple(writer.cast(each, dtype, out.dtype) for each, out in zip(made, outs, strict=True))


def _bilinear(*, backward: bool) -> Form:
    """Return the form of bilinear interpolation: two matrix products, since it is linear along each dimension."""

    def write(writer: Writer, out: Tensor, x: Node, *args: Any) -> Made:
        corners = bool(args[2] if backward else args[1])
        small, large = (out, value_of(x)) if backward else (value_of(x), out)
        sides = []
        for dim in (2, 3):
            # the weight of each input in each output, [inputs, outputs], from torch's interpolation of unit vectors
            inputs, outputs = small.shape[dim], large.shape[dim]
            unit = torch.eye(inputs).view(1, inputs, inputs, 1)
            with torch.no_grad():
                found = torch.nn.functional.interpolate(unit, (outputs, 1), mode="bilinear", align_corners=corners)
            weights = found[0, :, :, 0]
            transposed = weights.T if (dim == 2) != backward else weights
            sides.append(writer.cast(writer.array(transposed.numpy(), torch.float32), torch.float32, out.dtype))
        return writer.emit("MatMul", writer.emit("MatMul", sides[0], writer.tensor(x, out.dtype)), sides[1])

    return write


_ELEMENTWISE = {
    "Add": "add.Tensor add.Scalar",
    "Sub": "sub.Tensor sub.Scalar",
    "Mul": "mul.Tensor mul.Scalar",
    "Div": "div.Tensor div.Scalar",
    "Pow": "pow.Tensor_Scalar pow.Tensor_Tensor",
    "Max": "maximum.default",
    "Min": "minimum.default",
}
_LIKE_NAMED = ("Neg", "Abs", "Sqrt", "Exp", "Log", "Erf", "Sin", "Cos", "Tanh", "Relu", "Sigmoid", "Reciprocal")
"""Element-wise operators of one argument that have the same name in ATen."""
_FORMS: Mapping[str, Form] = {
    **{names: _elementwise(kind) for kind, names in _ELEMENTWISE.items()},
    **{f"{kind.lower()}.default": _elementwise(kind) for kind in _LIKE_NAMED},
    "logical_and.default bitwise_and.Tensor": _elementwise("And", "BitwiseAnd"),
    "logical_or.default bitwise_or.Tensor": _elementwise("Or", "BitwiseOr"),
    "logical_not.default bitwise_not.default": _elementwise("Not", "BitwiseNot"),
    "eq.Scalar eq.Tensor": _compared("Equal"),
    "ne.Scalar ne.Tensor": _compared("Equal", negated=True),
    "lt.Scalar lt.Tensor": _compared("Less"),
    "le.Scalar le.Tensor": _compared("LessOrEqual"),
    "gt.Scalar gt.Tensor": _compared("Greater"),
    "ge.Scalar ge.Tensor": _compared("GreaterOrEqual"),
    "rsqrt.default": _rsqrt,
    "where.self": _where,
    "clamp.default": _clamp,
    "gelu.default": _gelu,
    "clone.default alias.default detach.default lift_fresh_copy.default": _same,
    "copy.default": _copy,
    "_to_copy.default": _to_copy,
    "full.default full_like.default scalar_tensor.default": _full,
    "empty.memory_format empty_permuted.default": _empty,
    "arange.start_step": _arange,
    "rand.default rand_like.default": _random,
    "bernoulli.p": _bernoulli,
    "view.default reshape.default unsqueeze.default squeeze.dims squeeze.dim": _shaped("Reshape"),
    "expand.default": _shaped("Expand"),
    "permute.default transpose.int t.default": _permute,
    "select.int": _select,
    "slice.Tensor": _slice,
    "split_with_sizes.default": _split,
    "cat.default": _cat,
    "sum.dim_IntList sum.default": _reduced("ReduceSum"),
    "mean.dim mean.default": _reduced("ReduceMean"),
    "amax.default": _reduced("ReduceMax"),
    "amin.default": _reduced("ReduceMin"),
    "_softmax.default": _along("Softmax"),
    "_log_softmax.default": _along("LogSoftmax"),
    "embedding.default": _embedding,
    "gather.default": _gather,
    "scatter.value scatter.src": _scatter,
    "index_put.default": _index_put,
    "mm.default bmm.default": _product,
    "addmm.default": _addmm,
    "convolution.default": _convolution,
    "max_pool2d_with_indices.default": _max_pool,
    "max_pool2d_with_indices_backward.default": _max_pool_backward,
    "avg_pool2d.default": _average_pool,
    "native_layer_norm.default": _layer_norm,
    "upsample_bilinear2d.default": _bilinear(backward=False),
    "upsample_bilinear2d_backward.default": _bilinear(backward=True),
}
OPERATORS: Mapping[Any, Form] = {
    operator.getitem: _getitem,
    **{resolve(f"aten.{name}"): form for names, form in _FORMS.items() for name in names.split()},
}
"""Forms by ATen operator."""
