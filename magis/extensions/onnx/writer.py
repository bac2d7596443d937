"""Writer of an ONNX graph: nodes, constants and casts, with names and shapes from the FX graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch.fx import Node

from magis.errors import UsageError

ELEMENT: Mapping[torch.dtype, int] = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.int16: onnx.TensorProto.INT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}
"""ONNX's element type by data type that a step may use."""


class Fill(NamedTuple):
    """Tensor filled with one number; no constant is written until an operator needs the whole tensor."""

    value: float | bool


Made: TypeAlias = "str | Fill | Sequence[str]"
"""ONNX form of an FX node: the name of a value, a fill, or the names of several values."""


class Writer:
    """Nodes and initializers of an ONNX graph under construction; methods take and return names of values."""

    def __init__(self, scalars: Mapping[float, str]) -> None:
        """``scalars``: placeholder numbers -> names of the 0-d float32 inputs that replace them."""
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.used_scalars: set[str] = set()
        self.made: dict[Node, Made] = {}
        """ONNX forms of the FX nodes so far."""
        self._scalars = scalars
        self._constants: dict[tuple[Any, ...], str] = {}
        self._casts: dict[tuple[str, int], str] = {}
        self._numbers = itertools.count()

    def emit(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Write one ONNX operator, and return the name of its output."""
        return self.emit_several(kind, *inputs, outputs=1, **attributes)[0]

    def emit_several(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> tuple[str, ...]:
        """Write one ONNX operator with several outputs, and return their names."""
        names = tuple(f"v{next(self._numbers)}" for _ in range(outputs))
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(kind, inputs, names, **given))
        return names

    def ints(self, numbers: Iterable[int]) -> str:
        """Write a 1-d int64 constant, as ONNX expects for shapes and axes, and return its name."""
        return self.array(list(numbers), torch.int64)

    def array(self, data: Any, dtype: torch.dtype) -> str:
        """Write a constant tensor, and return its name; equal constants are written once."""
        array = np.array(data, dtype=helper.tensor_dtype_to_np_dtype(ELEMENT[dtype]), order="C")
        return self._constant((array.dtype.str, array.shape, array.tobytes()), numpy_helper.from_array(array))

    def _constant(self, key: tuple[Any, ...], tensor: onnx.TensorProto) -> str:
        name = self._constants.setdefault(key, f"c{len(self._constants)}")
        if name not in self.initializers:
            tensor.name = name
            self.initializers[name] = tensor
        return name

    def number(self, value: float | bool, dtype: torch.dtype) -> str:
        """Write a 0-d constant and return its name, or the scalar input's name for a placeholder number."""
        if isinstance(value, float) and value in self._scalars:
            name = self._scalars[value]
            self.used_scalars.add(name)
            return self.cast(name, torch.float32, dtype)
        element = ELEMENT[dtype]
        return self._constant(("number", element, repr(value)), helper.make_tensor("", element, [], [value]))

    def cast(self, name: str, dtype: torch.dtype, wanted: torch.dtype) -> str:
        """Return the name of the tensor cast to another data type; each cast is written once."""
        if dtype == wanted:
            return name
        key = (name, ELEMENT[wanted])
        if key not in self._casts:
            self._casts[key] = self.emit("Cast", name, to=ELEMENT[wanted])
        return self._casts[key]

    def tensor(self, arg: Any, wanted: torch.dtype | None = None) -> str:
        """Return the name of an argument as a whole tensor, cast to ``wanted`` if given."""
        if not isinstance(arg, Node):
            return self.number(arg, wanted or torch.float32)
        made, like = self.made[arg], value_of(arg)
        dtype = wanted or like.dtype
        if isinstance(made, Fill):
            number = self.number(made.value, dtype)
            return self.emit("Expand", number, self.ints(like.shape)) if like.dim() else number
        if not isinstance(made, str):
            raise UsageError(f"ONNX Runtime cannot run {arg.target}: several tensors where one is meant")
        return self.cast(made, like.dtype, dtype)

    def operands(self, args: Sequence[Any], wanted: Sequence[torch.dtype], shape: Sequence[int]) -> list[str]:
        """Return the names of an element-wise operator's arguments; fills stay 0-d if they broadcast to ``shape``."""
        made = [self.made[arg] if isinstance(arg, Node) else Fill(arg) for arg in args]
        shapes = [value_of(arg).shape for arg, each in zip(args, made, strict=True) if not isinstance(each, Fill)]
        enough = torch.broadcast_shapes(*shapes) == tuple(shape) if shapes else not shape
        return [
            self.number(each.value, dtype) if enough and isinstance(each, Fill) else self.tensor(arg, dtype)
            for arg, each, dtype in zip(args, made, wanted, strict=True)
        ]


def value_of(node: Node) -> torch.Tensor:
    """Return the fake tensor of an FX node. Raises UsageError for a node that is no tensor of a supported data type."""
    found = node.meta["val"]
    if not isinstance(found, torch.Tensor) or found.dtype not in ELEMENT:
        what = found.dtype if isinstance(found, torch.Tensor) else type(found).__name__
        raise UsageError(f"ONNX Runtime cannot run {node.target}: it makes a {what}", hint="leave out the strategy ort")
    return found
