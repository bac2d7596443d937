"""ONNX forms (operator set 20) of the ATen operators of a traced step, one function or row each.

torch.onnx.export is not usable: it loses in-place writes of a step, and computes wrong gradients (docs/strategies.md).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from magis.extensions.onnx.writer import ELEMENT, Fill, Made, Writer, value_of
from magis.ops.call import resolve

Operator = Callable[[Writer, Node], Made]
"""Function that writes the ONNX form of one FX node."""


def by_operator(forms: Mapping[str, Operator]) -> dict[Any, Operator]:
    """Return the forms by ATen operator, from rows that list several operator names."""
    return {resolve(f"aten.{name}"): form for names, form in forms.items() for name in names.split()}


def first_of(node: Node) -> Tensor:
    """Return the fake tensor of a node's first argument."""
    return value_of(cast("Node", node.args[0]))


def _dims(node: Node, at: int, rank: int) -> list[int]:
    """Return the dimensions given by an argument; all dimensions if it is missing or empty."""
    given = node.args[at] if len(node.args) > at else None
    listed: Any = [given] if isinstance(given, int) else given
    return [dim % rank for dim in listed] if listed else list(range(rank))


def _argument(node: Node, at: int, name: str, default: Any = None) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)


def kind_of(dtype: torch.dtype) -> str:
    """Return numpy's name of a data type."""
    return str(dtype).removeprefix("torch.")


# Element by element.


def _elementwise(kind: str, whole_numbers: str = "") -> Operator:
    """Return the form of an element-wise operator; ``whole_numbers``: its kind for integers if ``kind`` is logical."""

    def write(writer: Writer, node: Node) -> Made:
        out = value_of(node)
        names = writer.operands(node.args, [out.dtype] * len(node.args), out.shape)
        if "alpha" in node.kwargs:
            factor: Any = node.kwargs["alpha"]
            names[1] = writer.emit("Mul", names[1], writer.number(float(factor), out.dtype))
        return writer.emit(whole_numbers if whole_numbers and out.dtype != torch.bool else kind, *names)

    return write


def _compared(kind: str, *, negated: bool = False) -> Operator:
    def write(writer: Writer, node: Node) -> Made:
        kinds: list[Any] = [value_of(arg) if isinstance(arg, Node) else arg for arg in node.args]
        dtype = torch.result_type(kinds[0], kinds[1])
        if dtype == torch.bool and kind != "Equal":
            dtype = torch.uint8
        made = writer.emit(kind, *writer.operands(node.args, [dtype] * 2, value_of(node).shape))
        return writer.emit("Not", made) if negated else made

    return write


def _rsqrt(writer: Writer, node: Node) -> Made:
    return writer.emit("Reciprocal", writer.emit("Sqrt", writer.tensor(node.args[0])))


def _where(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    return writer.emit("Where", *writer.operands(node.args, [torch.bool, out.dtype, out.dtype], out.shape))


def _clamp(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    name = writer.tensor(node.args[0], out.dtype)
    for kind, bound in (("Max", _argument(node, 1, "min")), ("Min", _argument(node, 2, "max"))):
        if bound is not None:
            name = writer.emit(kind, name, writer.tensor(bound, out.dtype))
    return name


def _gelu(writer: Writer, node: Node) -> Made:
    return writer.emit("Gelu", writer.tensor(node.args[0]), approximate=_argument(node, 1, "approximate", "none"))


# Tensors out of nothing, and copies.


def _same(writer: Writer, node: Node) -> Made:
    """Return the node's first argument itself, without a copy, since no value is written in-place."""
    arg = node.args[0]
    return writer.found(arg) if isinstance(arg, Node) else Fill(cast("float", arg))


def _to_copy(writer: Writer, node: Node) -> Made:
    made = _same(writer, node)
    return made if isinstance(made, Fill) else writer.tensor(node.args[0], value_of(node).dtype)


def _copy(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    name = writer.tensor(node.args[1], out.dtype)
    same = isinstance(node.args[1], Node) and value_of(node.args[1]).shape == out.shape
    return name if same else writer.emit("Expand", name, writer.ints(out.shape))


def _fill(position: int) -> Operator:
    return lambda _writer, node: Fill(cast("float", node.args[position]))


def _zeros(_writer: Writer, _node: Node) -> Made:
    """Return zeros for an uninitialized tensor."""
    return Fill(0)


def _arange(writer: Writer, node: Node) -> Made:
    ends: Any = node.args
    return writer.array(np.arange(*ends).astype(kind_of(value_of(node).dtype)))


def _drawn(writer: Writer, out: Tensor) -> str:
    """Draw float32 numbers, uniform between 0 and 1, from ONNX Runtime's own generator."""
    made = writer.emit("RandomUniform", shape=list(out.shape) or [1], dtype=ELEMENT[torch.float32])
    return made if out.dim() else writer.emit("Reshape", made, writer.ints([]))


def _random(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    return writer.cast(_drawn(writer, out), torch.float32, out.dtype)


def _bernoulli(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    chance = writer.number(float(cast("float", node.args[1])), torch.float32)
    return writer.cast(writer.emit("Less", _drawn(writer, out), chance), torch.bool, out.dtype)


# Elements in other places.


def _unless_filled(form: Operator) -> Operator:
    """Return the form of an operator that moves elements, which leaves a filled tensor unchanged."""

    def write(writer: Writer, node: Node) -> Made:
        made = _same(writer, node)
        return made if isinstance(made, Fill) else form(writer, node)

    return write


def _shaped(kind: str) -> Operator:
    return _unless_filled(
        lambda writer, node: writer.emit(kind, writer.tensor(node.args[0]), writer.ints(value_of(node).shape))
    )


def _permute(writer: Writer, node: Node) -> Made:
    rank = value_of(node).dim()
    order = list(range(rank))
    if len(node.args) == 3:  # transpose
        given: Any = node.args[1:]
        first, second = given[0] % rank, given[1] % rank
        order[first], order[second] = second, first
    else:
        order = _dims(node, 1, rank) if len(node.args) == 2 else order[::-1]
    return writer.emit("Transpose", writer.tensor(node.args[0]), perm=order)


def _select(writer: Writer, node: Node) -> Made:
    shape, (x, at, index) = first_of(node).shape, cast("Any", node.args)
    dim = at % len(shape)
    position = writer.array(np.array(index % shape[dim], dtype=np.int64))
    return writer.emit("Gather", writer.tensor(x), position, axis=dim)


def _slice(writer: Writer, node: Node) -> Made:
    shape = first_of(node).shape
    dim = _argument(node, 1, "dim", 0) % len(shape)
    start, end, step = _argument(node, 2, "start"), _argument(node, 3, "end"), _argument(node, 4, "step", 1)
    if shape == value_of(node).shape:
        return _same(writer, node)
    numbers = (start or 0, shape[dim] if end is None else end, dim, step)
    return writer.emit("Slice", writer.tensor(node.args[0]), *(writer.ints([number]) for number in numbers))


def _split(writer: Writer, node: Node) -> Made:
    parts = node.meta["val"]
    dim = _argument(node, 2, "dim", 0) % parts[0].dim()
    lengths = writer.ints(part.shape[dim] for part in parts)
    return writer.emit_several("Split", writer.tensor(node.args[0]), lengths, axis=dim, outputs=len(parts))


def _getitem(writer: Writer, node: Node) -> Made:
    made: Any = _same(writer, node)  # of an operator with several results
    return cast("Made", made[node.args[1]])


def _cat(writer: Writer, node: Node) -> Made:
    out, given = value_of(node), cast("Sequence[Node]", node.args[0])
    names = [writer.tensor(part, out.dtype) for part in given if value_of(part).numel()]
    return writer.emit("Concat", *names, axis=_argument(node, 1, "dim", 0) % out.dim())


# Reductions and indices.


def _reduced(kind: str) -> Operator:
    def write(writer: Writer, node: Node) -> Made:
        rank = first_of(node).dim()
        name = writer.tensor(node.args[0], value_of(node).dtype)
        if not rank:
            return name
        return writer.emit(
            kind, name, writer.ints(_dims(node, 1, rank)), keepdims=int(bool(_argument(node, 2, "keepdim", False)))
        )

    return write


def _along(kind: str) -> Operator:
    def write(writer: Writer, node: Node) -> Made:
        out = value_of(node)
        return writer.emit(kind, writer.tensor(node.args[0], out.dtype), axis=_dims(node, 1, out.dim() or 1)[0])

    return write


def in_float(dtype: torch.dtype) -> torch.dtype:
    """Return the data type for scatter-add in ONNX Runtime, which has no half-precision kernels for it."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _index_put(writer: Writer, node: Node) -> Made:
    """Emit index_put(x, [index, ...], values, accumulate) as ScatterND."""
    given: Any = node.args[1]
    mode = "add" if _argument(node, 3, "accumulate", False) else "none"
    indices = [writer.emit("Unsqueeze", writer.tensor(index, torch.int64), writer.ints([-1])) for index in given]
    if len(indices) > 1:
        indices = [writer.emit("Concat", *indices, axis=-1)]
    dtype = value_of(node).dtype
    summed = in_float(dtype)
    names = [writer.tensor(node.args[0], summed), indices[0], writer.tensor(node.args[2], summed)]
    return writer.cast(writer.emit("ScatterND", *names, reduction=mode), summed, dtype)


def _embedding(writer: Writer, node: Node) -> Made:
    return writer.emit("Gather", *(writer.tensor(arg) for arg in node.args[:2]), axis=0)


def _gather(writer: Writer, node: Node) -> Made:
    return writer.emit("GatherElements", writer.tensor(node.args[0]), writer.tensor(node.args[2]), axis=node.args[1])


def _scatter(writer: Writer, node: Node) -> Made:
    x, dim, index, given = cast("Any", node.args)
    source = writer.tensor(given, value_of(node).dtype)
    if not isinstance(given, Node):
        source = writer.emit("Expand", source, writer.ints(value_of(index).shape))
    return writer.emit("ScatterElements", writer.tensor(x), writer.tensor(index), source, axis=dim)


_ELEMENTWISE = {
    "Add": "add.Tensor add.Scalar",
    "Sub": "sub.Tensor sub.Scalar",
    "Mul": "mul.Tensor mul.Scalar",
    "Div": "div.Tensor div.Scalar",
    "Pow": "pow.Tensor_Scalar pow.Tensor_Tensor",
    "Max": "maximum.default",
    "Min": "minimum.default",
    "Neg": "neg.default",
    "Abs": "abs.default",
    "Sqrt": "sqrt.default",
    "Exp": "exp.default",
    "Log": "log.default",
    "Erf": "erf.default",
    "Sin": "sin.default",
    "Cos": "cos.default",
    "Tanh": "tanh.default",
    "Relu": "relu.default",
    "Sigmoid": "sigmoid.default",
    "Reciprocal": "reciprocal.default",
}
_FORMS: Mapping[str, Operator] = {
    **{names: _elementwise(kind) for kind, names in _ELEMENTWISE.items()},
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
    "full.default full_like.default": _fill(1),
    "scalar_tensor.default": _fill(0),
    "empty.memory_format empty_permuted.default": _zeros,
    "arange.start_step": _arange,
    "rand.default rand_like.default": _random,
    "bernoulli.p": _bernoulli,
    "view.default reshape.default unsqueeze.default squeeze.dims squeeze.dim": _shaped("Reshape"),
    "expand.default": _shaped("Expand"),
    "permute.default transpose.int t.default": _unless_filled(_permute),
    "select.int": _unless_filled(_select),
    "slice.Tensor": _unless_filled(_slice),
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
}
OPERATORS: Mapping[Any, Operator] = {operator.getitem: _getitem, **by_operator(_FORMS)}
"""Forms by ATen operator; those of layers are in `layers`."""
