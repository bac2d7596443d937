"""What each ATen operator of a traced step is in ONNX (operator set 20), one function or row each.

Written out here, since torch.onnx.export traces and decomposes the step twice more: 18 to 32 seconds for the small
networks, which this takes a fraction of a second for (docs/strategies.md).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from magis.strategies.ort.writer import ELEMENT, Fill, Made, Writer, value_of

Operator = Callable[[Writer, Node], Made]
"""Writes the ONNX form of one FX node."""


def _dims(node: Node, at: int, rank: int) -> list[int]:
    """The dimensions that an argument names, all of them where it names none."""
    given = node.args[at] if len(node.args) > at else None
    listed: Any = [given] if isinstance(given, int) else given
    return [dim % rank for dim in listed] if listed else list(range(rank))


def _arg(node: Node, at: int, name: str, default: Any = None) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)


def _elementwise(kind: str) -> Operator:
    def write(writer: Writer, node: Node) -> Made:
        out = value_of(node)
        names = writer.operands(node.args, [out.dtype] * len(node.args), out.shape)
        if "alpha" in node.kwargs:
            factor: Any = node.kwargs["alpha"]
            names[1] = writer.emit("Mul", names[1], writer.number(float(factor), out.dtype))
        made: str = writer.emit(kind, *names)
        return made

    return write


def _unary(kind: str) -> Operator:
    def write(writer: Writer, node: Node) -> Made:
        made: str = writer.emit(kind, writer.tensor(node.args[0], value_of(node).dtype))
        return made

    return write


def _compared(kind: str, *, negated: bool = False) -> Operator:
    def write(writer: Writer, node: Node) -> Made:
        kinds: list[Any] = [value_of(arg) if isinstance(arg, Node) else arg for arg in node.args]
        dtype = torch.result_type(kinds[0], kinds[1])
        if dtype == torch.bool and kind != "Equal":
            dtype = torch.uint8
        made: str = writer.emit(kind, *writer.operands(node.args, [dtype] * 2, value_of(node).shape))
        return writer.emit("Not", made) if negated else made

    return write


def _logical(kind: str, whole_numbers: str) -> Operator:
    """``kind`` for booleans (what else is not zero counts as True), ``whole_numbers`` for bits."""

    def write(writer: Writer, node: Node) -> Made:
        out = value_of(node)
        names = writer.operands(node.args, [out.dtype] * len(node.args), out.shape)
        made: str = writer.emit(kind if out.dtype == torch.bool else whole_numbers, *names)
        return made

    return write


def _same(writer: Writer, node: Node) -> Made:
    """The tensor itself: nothing is ever written to it."""
    arg = node.args[0]
    return writer.found(arg) if isinstance(arg, Node) else Fill(arg)  # type: ignore[arg-type]


def _to_copy(writer: Writer, node: Node) -> Made:
    made = _same(writer, node)
    return made if isinstance(made, Fill) else writer.tensor(node.args[0], value_of(node).dtype)


def _copy(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    name = writer.tensor(node.args[1], out.dtype)
    same = isinstance(node.args[1], Node) and value_of(node.args[1]).shape == out.shape
    return name if same else writer.emit("Expand", name, writer.ints(out.shape))


def _fill(position: int) -> Operator:
    def write(_writer: Writer, node: Node) -> Made:
        return Fill(node.args[position])  # type: ignore[arg-type]  # a number, by the operator's schema

    return write


def _zeros(_writer: Writer, _node: Node) -> Made:
    """Zeros; memory that nobody has written to may hold them, too."""
    return Fill(0)


def _arange(writer: Writer, node: Node) -> Made:
    ends: Any = node.args
    kind = str(value_of(node).dtype).removeprefix("torch.")
    return writer.array(np.arange(*ends).astype(kind))


def _random(writer: Writer, node: Node) -> Made:
    """Numbers of ONNX Runtime's own generator, uniform between 0 and 1."""
    out = value_of(node)
    shape = list(out.shape) or [1]
    made: str = writer.emit("RandomUniform", shape=shape, dtype=ELEMENT[torch.float32])
    if not out.dim():
        made = writer.emit("Reshape", made, writer.ints([]))
    return writer.cast(made, torch.float32, out.dtype)


def _bernoulli(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    shape = list(out.shape) or [1]
    drawn = writer.emit("RandomUniform", shape=shape, dtype=ELEMENT[torch.float32])
    chosen = writer.emit("Less", drawn, writer.number(float(node.args[1]), torch.float32))  # type: ignore[arg-type]
    return writer.cast(chosen, torch.bool, out.dtype)


def _view(writer: Writer, node: Node) -> Made:
    made = _same(writer, node)
    if isinstance(made, Fill):
        return made
    return writer.emit("Reshape", writer.tensor(node.args[0]), writer.ints(value_of(node).shape))  # type: ignore[no-any-return]


def _expand(writer: Writer, node: Node) -> Made:
    made = _same(writer, node)
    if isinstance(made, Fill):
        return made
    return writer.emit("Expand", writer.tensor(node.args[0]), writer.ints(value_of(node).shape))  # type: ignore[no-any-return]


def _permute(writer: Writer, node: Node) -> Made:
    made, rank = _same(writer, node), value_of(node).dim()
    order = list(range(rank))
    if len(node.args) == 3:  # transpose
        given: Any = node.args[1:]
        first, second = given[0] % rank, given[1] % rank
        order[first], order[second] = second, first
    else:
        order = _dims(node, 1, rank) if len(node.args) == 2 else order[::-1]
    return made if isinstance(made, Fill) else writer.emit("Transpose", writer.tensor(node.args[0]), perm=order)


def _select(writer: Writer, node: Node) -> Made:
    made = _same(writer, node)
    if isinstance(made, Fill):
        return made
    like = value_of(node.args[0])  # type: ignore[arg-type]  # a tensor, by the operator's schema
    dim = int(node.args[1]) % like.dim()  # type: ignore[arg-type]
    index = int(node.args[2]) % like.shape[dim]  # type: ignore[arg-type]
    position = writer.array(np.array(index, dtype=np.int64))
    return writer.emit("Gather", writer.tensor(node.args[0]), position, axis=dim)  # type: ignore[no-any-return]


def _slice(writer: Writer, node: Node) -> Made:
    made = _same(writer, node)
    like = value_of(node.args[0])  # type: ignore[arg-type]
    dim = _arg(node, 1, "dim", 0) % like.dim()
    start, end, step = _arg(node, 2, "start"), _arg(node, 3, "end"), _arg(node, 4, "step", 1)
    if isinstance(made, Fill) or tuple(like.shape) == tuple(value_of(node).shape):
        return made
    numbers = (start or 0, like.shape[dim] if end is None else end, dim, step)
    return writer.emit("Slice", writer.tensor(node.args[0]), *(writer.ints([number]) for number in numbers))  # type: ignore[no-any-return]


def _split(writer: Writer, node: Node) -> Made:
    parts = node.meta["val"]
    dim = _arg(node, 2, "dim", 0) % parts[0].dim()
    lengths = writer.ints(part.shape[dim] for part in parts)
    made = writer.emit("Split", writer.tensor(node.args[0]), lengths, axis=dim, outputs=len(parts))
    return (made,) if isinstance(made, str) else tuple(made)


def _getitem(writer: Writer, node: Node) -> Made:
    made = _same(writer, node)
    return made[node.args[1]]  # type: ignore[index]  # of an operator with several results


def _cat(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    parts = [part for part in node.args[0] if value_of(part).numel()]  # type: ignore[union-attr, arg-type]
    names = [writer.tensor(part, out.dtype) for part in parts]
    return writer.emit("Concat", *names, axis=_arg(node, 1, "dim", 0) % out.dim())  # type: ignore[no-any-return]


def _reduced(kind: str) -> Operator:
    def write(writer: Writer, node: Node) -> Made:
        out, like = value_of(node), value_of(node.args[0])  # type: ignore[arg-type]
        if not like.dim():
            return writer.tensor(node.args[0], out.dtype)
        name = writer.tensor(node.args[0], out.dtype)
        axes = writer.ints(_dims(node, 1, like.dim()))
        made: str = writer.emit(kind, name, axes, keepdims=int(bool(_arg(node, 2, "keepdim", False))))
        return made

    return write


def _along(kind: str) -> Operator:
    def write(writer: Writer, node: Node) -> Made:
        out = value_of(node)
        made: str = writer.emit(kind, writer.tensor(node.args[0], out.dtype), axis=_dims(node, 1, out.dim() or 1)[0])
        return made

    return write


def _where(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    names = writer.operands(node.args, [torch.bool, out.dtype, out.dtype], out.shape)
    return writer.emit("Where", *names)  # type: ignore[no-any-return]


def _clamp(writer: Writer, node: Node) -> Made:
    out = value_of(node)
    name = writer.tensor(node.args[0], out.dtype)
    for kind, bound in (("Max", _arg(node, 1, "min")), ("Min", _arg(node, 2, "max"))):
        if bound is not None:
            name = writer.emit(kind, name, writer.tensor(bound, out.dtype))
    return name


def _gelu(writer: Writer, node: Node) -> Made:
    kind = _arg(node, 1, "approximate", "none")
    return writer.emit("Gelu", writer.tensor(node.args[0]), approximate=kind)  # type: ignore[no-any-return]


def in_float(dtype: torch.dtype) -> torch.dtype:
    """The type in which ONNX Runtime adds up what is scattered: it has no kernels for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _one_hot_sums(writer: Writer, node: Node) -> Made:
    """index_put(x, [index], values, accumulate): rows of x, where index names them."""
    given: Any = node.args[1]
    mode = "add" if _arg(node, 3, "accumulate", False) else "none"
    indices = [writer.emit("Unsqueeze", writer.tensor(index, torch.int64), writer.ints([-1])) for index in given]
    if len(indices) > 1:
        indices = [writer.emit("Concat", *indices, axis=-1)]
    dtype = value_of(node).dtype
    summed = in_float(dtype)
    names = [writer.tensor(node.args[0], summed), indices[0], writer.tensor(node.args[2], summed)]
    return writer.cast(writer.emit("ScatterND", *names, reduction=mode), summed, dtype)


def _embedding(writer: Writer, node: Node) -> Made:
    return writer.emit("Gather", *(writer.tensor(arg) for arg in node.args[:2]), axis=0)  # type: ignore[no-any-return]


def _gather(writer: Writer, node: Node) -> Made:
    names = [writer.tensor(node.args[0]), writer.tensor(node.args[2])]
    return writer.emit("GatherElements", *names, axis=node.args[1])  # type: ignore[no-any-return]


def _scatter(writer: Writer, node: Node) -> Made:
    out, index = value_of(node), node.args[2]
    source = writer.tensor(node.args[3], out.dtype)
    if not isinstance(node.args[3], Node):
        source = writer.emit("Expand", source, writer.ints(value_of(index).shape))  # type: ignore[arg-type]
    names = [writer.tensor(node.args[0]), writer.tensor(index), source]
    return writer.emit("ScatterElements", *names, axis=node.args[1])  # type: ignore[no-any-return]


_aten: Any = torch.ops.aten

OPERATORS: Mapping[Any, Operator] = {
    _aten.add.Tensor: _elementwise("Add"),
    _aten.add.Scalar: _elementwise("Add"),
    _aten.sub.Tensor: _elementwise("Sub"),
    _aten.sub.Scalar: _elementwise("Sub"),
    _aten.mul.Tensor: _elementwise("Mul"),
    _aten.mul.Scalar: _elementwise("Mul"),
    _aten.div.Tensor: _elementwise("Div"),
    _aten.div.Scalar: _elementwise("Div"),
    _aten.pow.Tensor_Scalar: _elementwise("Pow"),
    _aten.pow.Tensor_Tensor: _elementwise("Pow"),
    _aten.maximum.default: _elementwise("Max"),
    _aten.minimum.default: _elementwise("Min"),
    _aten.neg.default: _unary("Neg"),
    _aten.abs.default: _unary("Abs"),
    _aten.sqrt.default: _unary("Sqrt"),
    _aten.exp.default: _unary("Exp"),
    _aten.log.default: _unary("Log"),
    _aten.erf.default: _unary("Erf"),
    _aten.sin.default: _unary("Sin"),
    _aten.cos.default: _unary("Cos"),
    _aten.tanh.default: _unary("Tanh"),
    _aten.relu.default: _unary("Relu"),
    _aten.sigmoid.default: _unary("Sigmoid"),
    _aten.reciprocal.default: _unary("Reciprocal"),
    _aten.rsqrt.default: lambda w, n: w.emit("Reciprocal", w.emit("Sqrt", w.tensor(n.args[0]))),
    _aten.eq.Scalar: _compared("Equal"),
    _aten.eq.Tensor: _compared("Equal"),
    _aten.ne.Scalar: _compared("Equal", negated=True),
    _aten.ne.Tensor: _compared("Equal", negated=True),
    _aten.lt.Scalar: _compared("Less"),
    _aten.lt.Tensor: _compared("Less"),
    _aten.le.Scalar: _compared("LessOrEqual"),
    _aten.le.Tensor: _compared("LessOrEqual"),
    _aten.gt.Scalar: _compared("Greater"),
    _aten.gt.Tensor: _compared("Greater"),
    _aten.ge.Scalar: _compared("GreaterOrEqual"),
    _aten.ge.Tensor: _compared("GreaterOrEqual"),
    _aten.logical_and.default: _logical("And", "And"),
    _aten.logical_or.default: _logical("Or", "Or"),
    _aten.logical_not.default: _logical("Not", "Not"),
    _aten.bitwise_and.Tensor: _logical("And", "BitwiseAnd"),
    _aten.bitwise_or.Tensor: _logical("Or", "BitwiseOr"),
    _aten.bitwise_not.default: _logical("Not", "BitwiseNot"),
    _aten.where.self: _where,
    _aten.clamp.default: _clamp,
    _aten.gelu.default: _gelu,
    _aten.clone.default: _same,
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.lift_fresh_copy.default: _same,
    _aten.copy.default: _copy,
    _aten._to_copy.default: _to_copy,
    _aten.full.default: _fill(1),
    _aten.full_like.default: _fill(1),
    _aten.scalar_tensor.default: _fill(0),
    _aten.empty.memory_format: _zeros,
    _aten.empty_permuted.default: _zeros,
    _aten.arange.start_step: _arange,
    _aten.rand.default: _random,
    _aten.rand_like.default: _random,
    _aten.bernoulli.p: _bernoulli,
    _aten.view.default: _view,
    _aten.reshape.default: _view,
    _aten.unsqueeze.default: _view,
    _aten.squeeze.dims: _view,
    _aten.squeeze.dim: _view,
    _aten.expand.default: _expand,
    _aten.permute.default: _permute,
    _aten.transpose.int: _permute,
    _aten.t.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split_with_sizes.default: _split,
    operator.getitem: _getitem,
    _aten.cat.default: _cat,
    _aten.sum.dim_IntList: _reduced("ReduceSum"),
    _aten.sum.default: _reduced("ReduceSum"),
    _aten.mean.dim: _reduced("ReduceMean"),
    _aten.mean.default: _reduced("ReduceMean"),
    _aten.amax.default: _reduced("ReduceMax"),
    _aten.amin.default: _reduced("ReduceMin"),
    _aten._softmax.default: _along("Softmax"),
    _aten._log_softmax.default: _along("LogSoftmax"),
    _aten.embedding.default: _embedding,
    _aten.gather.default: _gather,
    _aten.scatter.value: _scatter,
    _aten.scatter.src: _scatter,
    _aten.index_put.default: _one_hot_sums,
}
"""Operator -> what writes it; those of layers are in `layers`."""
