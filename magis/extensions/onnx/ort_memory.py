"""Peak bytes of a step in ONNX Runtime: measured by its allocator, and predicted by its planner's rules.

ONNX Runtime does not use torch's allocator. Its profile records after every operator the bytes that are requested from
its arena (``mem_bytes_requested_in_use``), their peak with scratch and rounding (``mem_in_use_peak``), and the size of
the arena (``mem_arena_held``). Weights, state, batch and outputs are torch's tensors, and precomputed constants are
outside the arena; both are added. (Some small constants are in the arena and count twice: hundreds of bytes.)
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper

from magis.errors import MagisError
from magis.extensions.onnx.export import Exported
from magis.extensions.onnx.ort_session import bind, open_session
from magis.results import Memory, Term

# Predicted peak bytes of a step, from the graph that ONNX Runtime runs, by the rules of its ``allocation_planner.cc``
# for one stream on the CPU: a tensor reuses the memory of an input that may be overwritten and has no later reader;
# else the most recently freed buffer whose first tensor had the same shape and element size; else a new buffer, which
# is freed after the last use of the last tensor in it. Scratch inside kernels is not counted.

_VIEWS = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
"""Operators whose output always aliases their first input."""
_IN_PLACE = frozenset(
    (
        *("Abs", "Cast", "Ceil", "Clip", "Elu", "Erf", "Exp", "Floor", "LeakyRelu", "Log", "Neg", "Reciprocal"),
        *("Relu", "Sigmoid", "Softplus", "Sqrt", "Tanh"),
    )
)
"""Operators that run in-place if the input has the same shape and element size and no later reader. Binary operators
never do in ONNX Runtime 1.32, although its rules allow it: with them no predicted peak is right, without them all are.
"""


def planned_peak(model: onnx.ModelProto) -> int:
    """Return the peak bytes of tensors, constants included, beyond the model's inputs and outputs.

    Nodes run in the order of the graph. The shapes of all values must be known.
    """
    graph = model.graph
    tensors = _shapes_of(graph)
    outside = {value.name for value in (*graph.input, *graph.output)} | {value.name for value in graph.initializer}
    uses = Counter(name for node in graph.node for name in _reads(node))
    uses.update(value.name for value in graph.output)
    plan = _Plan(tensors, uses, outside)
    for node in graph.node:
        plan.add(node)
    return constant_bytes(model) + _peak(plan.buffers)


def constant_bytes(model: onnx.ModelProto) -> int:
    """Return the bytes of the constants in a graph."""
    return sum(_bytes(value.dims, value.data_type) for value in model.graph.initializer)


def in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model with its nodes in the order in which ONNX Runtime runs them.

    The order is depth-first from the last node without readers back to its inputs (``Graph::ReverseDFSFrom``).
    """
    nodes = list(model.graph.node)
    maker = {name: index for index, node in enumerate(nodes) for name in node.output}
    needs = [sorted({maker[name] for name in node.input if name in maker}) for node in nodes]
    needed = {index for each in needs for index in each}
    stack = [(index, False) for index in range(len(nodes)) if index not in needed]
    seen: set[int] = set()
    order = []
    while stack:
        index, done = stack.pop()
        if done:
            order.append(index)
        elif index not in seen:
            seen.add(index)
            stack.append((index, True))
            stack.extend((other, False) for other in needs[index] if other not in seen)
    sorted_model = onnx.ModelProto()
    sorted_model.CopyFrom(model)
    del sorted_model.graph.node[:]
    sorted_model.graph.node.extend(nodes[index] for index in order)
    return sorted_model


@dataclass
class _Buffer:
    """Buffer that holds one or several tensors, one after another."""

    like: tuple[tuple[int, ...], int]
    """Shape and element type of the first tensor in the buffer."""
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return _bytes(*self.like)


@dataclass
class _Plan:
    """State of the allocation planner during its pass over the nodes."""

    tensors: Mapping[str, tuple[tuple[int, ...], int]]
    """Shape and element type by name."""
    uses: Counter[str]
    outside: set[str]
    """Names of values whose memory is outside the step's arena."""
    buffers: list[_Buffer] = field(default_factory=list)
    home: dict[str, int] = field(default_factory=dict)
    """Index of the buffer of each value, by name."""
    left: dict[int, int] = field(default_factory=dict)
    """Number of remaining reads of the tensor in each buffer."""
    free: list[int] = field(default_factory=list)
    """Indices of freed buffers, the most recently freed first."""
    now: int = 0

    def add(self, node: onnx.NodeProto) -> None:
        """Assign buffers to the node's outputs, then free the buffers of inputs that were read for the last time."""
        reads = list(_reads(node))
        for name in filter(None, node.output):
            self._assign_buffer(node, name, reads)
        for name in reads:
            buffer = self.home.get(name)
            if buffer is not None:
                self.buffers[buffer].last = self.now
                self._release(buffer, 1)
        for name in filter(None, node.output):
            if name in self.home:
                self.buffers[self.home[name]].last = self.now
                if not self.uses[name]:
                    self._release(self.home[name], 0)
        self.now += 1

    def _release(self, buffer: int, count: int) -> None:
        self.left[buffer] -= count
        if not self.left[buffer] and (not self.free or self.free[0] != buffer):
            self.free.insert(0, buffer)

    def _assign_buffer(self, node: onnx.NodeProto, name: str, reads: Sequence[str]) -> None:
        if name in self.outside:
            return
        shape, kind = self.tensors[name]
        source = self._shared(node, shape, kind, reads)
        if source == "outside":
            return
        if source is not None:
            buffer = self.home[source]
        else:
            found = self._take_free(shape, kind)
            buffer = len(self.buffers) if found is None else found
            if found is None:
                self.buffers.append(_Buffer((shape, kind), self.now, self.now))
        self.home[name] = buffer
        self.left[buffer] = self.left.get(buffer, 0) + self.uses[name]

    def _shared(self, node: onnx.NodeProto, shape: tuple[int, ...], kind: int, reads: Sequence[str]) -> str | None:
        """Return the input whose memory the output reuses, "outside" for memory outside the arena; else None."""
        if node.op_type in _VIEWS:
            source = node.input[0]
            return source if source in self.home else "outside"
        if node.op_type in _IN_PLACE:
            for source in node.input:
                if source in self.home and self.left[self.home[source]] == reads.count(source) == 1:
                    other, element = self.tensors[source]
                    if other == shape and _size(element) == _size(kind):
                        return str(source)
        return None

    def _take_free(self, shape: tuple[int, ...], kind: int) -> int | None:
        """Take the most recently freed buffer with this shape and element size; None if there is none."""
        if not shape:
            return None
        for position, buffer in enumerate(self.free):
            other, element = self.buffers[buffer].like
            if other == shape and _size(element) == _size(kind):
                del self.free[position]
                return buffer
        return None


def _peak(buffers: Sequence[_Buffer]) -> int:
    changes: Counter[int] = Counter()
    for buffer in buffers:
        changes[buffer.first] += buffer.nbytes
        changes[buffer.last + 1] -= buffer.nbytes
    level = peak = 0
    for moment in sorted(changes):
        level += changes[moment]
        peak = max(peak, level)
    return peak


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Return the inputs that a node reads, with repetitions."""
    return (str(name) for name in node.input if name)


def _shapes_of(graph: onnx.GraphProto) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return shape and element type of every value by name. Raises MagisError for an unknown shape."""
    found = {value.name: (tuple(value.dims), value.data_type) for value in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        found[value.name] = (tuple(dim.dim_value for dim in kind.shape.dim), kind.elem_type)
    missing = [name for node in graph.node for name in node.output if name and name not in found]
    if missing:
        raise MagisError(f"the shape of {missing[0]!r} is not known: its memory cannot be predicted")
    return found


def _size(kind: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(kind).itemsize)


def _bytes(shape: Sequence[int], kind: int) -> int:
    return math.prod(shape) * _size(kind)


MEASURED = "ONNX Runtime's own count of its arena, from its profile; weights, state, batch, outputs and constants added"
"""Note of a measured row: the source of its bytes."""
PREDICTED = "ONNX Runtime's allocation planner replayed over the graph that it runs; no scratch inside operators"
"""Note of a predicted row: the source of its bytes."""

_STEPS = 2
_UNCAST = "InsertedPrecisionFreeCast_"
_FIGURES = ("mem_bytes_requested_in_use", "mem_in_use_peak", "mem_arena_held")


def persistent_bytes(exported: Exported) -> int:
    """Return the bytes that are allocated before and after a step: weights, statistics, state, batch, and the buffers
    for outputs (new weights and state, or the results of an inference)."""
    return sum(port.nbytes for port in (*exported.inputs, *exported.outputs)) + 4 * len(exported.scalars)


def measured_memory(exported: Exported, *, optimized: bool, name: str) -> Memory:
    """Run two steps on zeros, and return the memory that ONNX Runtime's profile records.

    ``tensor_bytes`` are requested bytes at the end of an operator; ``peak_bytes`` include scratch inside operators and
    rounding; ``reserved_bytes`` are those of the arena. Raises MagisError if the profile has no memory figures.
    """
    with tempfile.TemporaryDirectory(prefix="magis-ort-") as folder:
        path = Path(folder) / "run.onnx"
        session = open_session(
            exported.model, optimized=optimized, name=name, optimized_path=path, profile=Path(folder) / "step"
        )
        always = persistent_bytes(exported) + constant_bytes(onnx.load(path))
        ports = {port.name: torch.zeros(port.shape, dtype=port.dtype) for port in exported.inputs}
        ports.update((scalar, torch.ones(())) for scalar in exported.scalars)
        outputs = {port.name: torch.zeros(port.shape, dtype=port.dtype) for port in exported.outputs}
        binding = bind(session, ports, outputs)
        for _ in range(_STEPS):
            session.run_with_iobinding(binding)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    found = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    if not found or not all(figure in found[0] for figure in _FIGURES):
        raise MagisError(
            f"{name}: ONNX Runtime's profile says nothing of memory", hint="install onnxruntime 1.32 or newer"
        )
    tensors, peak, held = (max(int(args[figure]) for args in found) for figure in _FIGURES)
    return Memory(tensor_bytes=always + tensors, peak_bytes=always + peak, reserved_bytes=always + held)


def predicted_memory(exported: Exported, *, optimized: bool, name: str) -> tuple[Memory, tuple[Term, ...]]:
    """Predict the peak bytes of tensors, and the terms that sum up to them, without running the step.

    ONNX Runtime loads and optimizes the graph; its allocation planner's rules then assign memory. Tensors may be fake.
    """
    peak = persistent_bytes(exported) + planned_peak(_as_run(exported.model, optimized, name))
    groups: dict[str, int] = {}
    for port in exported.inputs:
        kind = port.name.partition(":")[0]
        groups[kind] = groups.get(kind, 0) + port.nbytes
    made = sum(port.nbytes for port in exported.outputs) + 4 * len(exported.scalars)
    rest = peak - sum(groups.values()) - made
    terms = (
        *(Term(kind, nbytes) for kind, nbytes in groups.items()),
        Term("outputs", made, "new weights and state are written beside the old ones"),
        Term("tensors of the step", rest, PREDICTED),
    )
    return Memory(tensor_bytes=peak, peak_bytes=peak), terms


def _as_run(model: onnx.ModelProto, optimized: bool, name: str) -> onnx.ModelProto:
    """Return the graph as ONNX Runtime runs it, in its order, with the shapes of all values."""
    shaped: Any = onnx.shape_inference.infer_shapes(model)
    if not optimized:
        return in_order(shaped)
    with tempfile.TemporaryDirectory(prefix="magis-ort-") as folder:
        path = Path(folder) / "optimized.onnx"
        open_session(model, optimized=True, name=name, optimized_path=path)
        run: onnx.ModelProto = onnx.load(path)
    made = {value for node in run.graph.node for value in node.output}
    run.graph.value_info.extend(value for value in shaped.graph.value_info if value.name in made)
    inferred: onnx.ModelProto = onnx.shape_inference.infer_shapes(run)
    inferred.graph.value_info.extend(_shapes_in_float(inferred.graph, shaped.graph))
    return inferred


def _shapes_in_float(graph: onnx.GraphProto, before: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield the shapes of float32 values that ONNX Runtime's own operators make in place of half-precision ones.

    It inserts these operators if there is no half-precision kernel. ONNX does not know them; each such value is named
    after the half-precision value of the same shape.
    """
    known = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    half = {_UNCAST + value.name: value for value in (*before.output, *before.value_info)}
    for name in (name for node in graph.node for name in node.output if name in half and name not in known):
        sizes = [dim.dim_value for dim in half[name].type.tensor_type.shape.dim]
        yield onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)
