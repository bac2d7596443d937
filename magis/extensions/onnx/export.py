"""Export of a traced step as an ONNX model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import helper
from torch import fx

from magis.errors import UsageError
from magis.extensions.onnx.functional_trace import Traced
from magis.extensions.onnx.layers import LAYERS
from magis.extensions.onnx.onnx_operators import OPERATORS
from magis.extensions.onnx.writer import ELEMENT, Fill, Writer, value_of

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
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


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
    outputs: tuple[Port, ...] = ()
    names = iter(traced.inputs)
    for node in traced.module.graph.nodes:
        if node.op == "placeholder":
            like, given = value_of(node), next(names)
            if given in traced.constants:
                dtype = str(like.dtype).removeprefix("torch.")
                data = np.array(traced.constants[given], dtype=dtype).reshape(tuple(like.shape))
                writer.keep(node, writer.array(data))
                continue
            inputs.append(Port(given, tuple(like.shape), like.dtype))
            writer.keep(node, given)
        elif node.op == "get_attr":
            tensor: torch.Tensor = getattr(traced.module, str(node.target))
            node.meta.setdefault("val", tensor)
            writer.keep(node, writer.array(tensor.detach().numpy()))
        elif node.op == "call_function":
            form = OPERATORS.get(node.target) or LAYERS.get(node.target)
            if form is None:
                raise UsageError(
                    f"{name}: ONNX Runtime cannot run its step: no ONNX form of {node.target} is known",
                    hint="leave out the strategy ort for this network",
                )
            writer.keep(node, form(writer, node))
        else:
            outputs = tuple(_write_outputs(writer, node.args[0], traced.outputs))
    scalars = tuple(sorted(writer.used_scalars))
    return Exported(_model_proto(writer, inputs, outputs, scalars), tuple(inputs), outputs, scalars, inference)


def _write_outputs(writer: Writer, given: Sequence[fx.Node], names: Sequence[str]) -> list[Port]:
    """Write every output under its own name through an Identity node, which also copies an unchanged input."""
    ports = []
    for node, name in zip(given, names, strict=True):
        like = value_of(node)
        made = writer.found(node)
        source = writer.tensor(node) if isinstance(made, Fill) else made
        writer.nodes.append(helper.make_node("Identity", [str(source)], [name]))
        ports.append(Port(name, tuple(like.shape), like.dtype))
    return ports


def _model_proto(
    writer: Writer, inputs: Sequence[Port], outputs: Sequence[Port], scalars: Sequence[str]
) -> onnx.ModelProto:
    nodes = _without_identities(writer.nodes, {port.name for port in outputs})
    graph = helper.make_graph(
        nodes,
        "step",
        [
            *map(_value_info, inputs),
            *(helper.make_tensor_value_info(name, ELEMENT[torch.float32], []) for name in scalars),
        ],
        [_value_info(port) for port in outputs],
        initializer=list(writer.initializers.values()),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION)


def _value_info(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, ELEMENT[port.dtype], port.shape)


def _without_identities(nodes: Sequence[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """Remove Identity nodes of outputs by renaming the producer's output, unless that has an output's name."""
    makers = {name for node in nodes if node.op_type != "Identity" for name in node.output}
    renamed: dict[str, str] = {}
    for node in nodes:
        if node.op_type == "Identity" and node.input[0] in makers and node.output[0] in outputs:
            renamed.setdefault(node.input[0], node.output[0])
    kept = [node for node in nodes if node.op_type != "Identity" or renamed.get(node.input[0]) != node.output[0]]
    for node in kept:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    return kept
