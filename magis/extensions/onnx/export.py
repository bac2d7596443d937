"""Export of a traced step as an ONNX model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import helper

from magis.errors import UsageError
from magis.extensions.onnx.functional_trace import Traced
from magis.extensions.onnx.onnx_operators import OPERATORS
from magis.extensions.onnx.writer import ELEMENT, Writer, value_of

OPSET = 20
"""Version of ONNX's operator set, the first with GELU."""
_IR_VERSION = 10


@dataclass(frozen=True)
class Port:
    """Input or output of the model: name, shape and data type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Exported:
    """ONNX model of a step, with its inputs and outputs."""

    model: onnx.ModelProto
    inputs: tuple[Port, ...]
    """Tensor inputs of the step; the inputs in ``scalars`` follow them."""
    outputs: tuple[Port, ...]
    scalars: tuple[str, ...]
    """Names of 0-d float32 inputs, whose values change from step to step."""
    inference: bool = False
    """True if the model is a forward pass only."""


def export(traced: Traced, name: str, *, inference: bool = False) -> Exported:
    """Return the ONNX model of a traced step (``inference``: of a forward pass).

    Raises UsageError, which names the first operator without an ONNX form.
    """
    writer = Writer(traced.scalars)
    inputs: list[Port] = []
    names = iter(traced.inputs)
    *body, end = traced.module.graph.nodes
    for node in body:
        if node.op == "placeholder":
            like, given = value_of(node), next(names)
            shape = tuple(like.shape)
            if given in traced.constants:
                writer.made[node] = writer.array(np.array(traced.constants[given]).reshape(shape), like.dtype)
            else:
                inputs.append(Port(given, shape, like.dtype))
                writer.made[node] = given
        elif node.op == "get_attr":
            tensor: torch.Tensor = getattr(traced.module, str(node.target)).detach()
            node.meta.setdefault("val", tensor)
            writer.made[node] = writer.array(tensor, tensor.dtype)
        else:
            form = OPERATORS.get(node.target)
            if form is None:
                raise UsageError(
                    f"{name}: ONNX Runtime cannot run its step: no ONNX form of {node.target} is known",
                    hint="leave out the strategy ort for this network",
                )
            several = isinstance(node.meta["val"], (tuple, list))
            out = node.meta["val"] if several else value_of(node)
            writer.made[node] = form(writer, out, *node.args, **node.kwargs)
    # The maker of a result gets the output's name. A constant, an input, or a result that has another output's name
    # is copied under the output's name.
    outputs = []
    renamed: dict[str, str] = {}
    outside = {*(port.name for port in inputs), *traced.scalars.values()}
    for node, given in zip(end.args[0], traced.outputs, strict=True):
        like, source = value_of(node), writer.tensor(node)
        outputs.append(Port(given, tuple(like.shape), like.dtype))
        unmade = source in outside or source in writer.initializers
        if unmade or renamed.setdefault(source, given) != given:
            writer.nodes.append(helper.make_node("Identity", [source], [given]))
    for each in writer.nodes:
        for used in (each.input, each.output):
            used[:] = [renamed.get(value, value) for value in used]
    scalars = tuple(sorted(writer.used_scalars))
    graph = helper.make_graph(
        writer.nodes,
        "step",
        list(map(_value_info, (*inputs, *(Port(scalar, (), torch.float32) for scalar in scalars)))),
        list(map(_value_info, outputs)),
        initializer=list(writer.initializers.values()),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION)
    return Exported(model, tuple(inputs), tuple(outputs), scalars, inference)


def _value_info(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, ELEMENT[port.dtype], port.shape)
