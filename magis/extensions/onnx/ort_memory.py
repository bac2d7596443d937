"""Peak bytes of a step in ONNX Runtime: measured by its allocator, and predicted by its planner's rules.

ONNX Runtime does not use torch's allocator. Its profile records after every operator the bytes that are requested from
its arena (``mem_bytes_requested_in_use``), their peak with scratch and rounding (``mem_in_use_peak``), and the size of
the arena (``mem_arena_held``). Weights, state, batch and outputs are torch's tensors, and precomputed constants are
outside the arena; both are added. (Some small constants are in the arena and count twice: hundreds of bytes.)
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

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

    Nodes run in the order of the graph. Raises MagisError for a value whose shape is not known.
    """
    graph = model.graph
    likes = {value.name: (tuple(value.dims), _itemsize(value.data_type)) for value in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        likes[value.name] = (tuple(dim.dim_value for dim in kind.shape.dim), _itemsize(kind.elem_type))
    missing = [name for node in graph.node for name in node.output if name and name not in likes]
    if missing:
        raise MagisError(f"the shape of {missing[0]!r} is not known: its memory cannot be predicted")
    uses = Counter(name for node in graph.node for name in node.input if name)
    uses.update(value.name for value in graph.output)
    plan = _Plan(likes, uses, {value.name for value in (*graph.input, *graph.output, *graph.initializer)})
    for moment, node in enumerate(graph.node):
        plan.add(node, moment)
    changes: Counter[int] = Counter()
    for buffer in plan.buffers:
        changes[buffer.first] += buffer.nbytes
        changes[buffer.last + 1] -= buffer.nbytes
    return constant_bytes(model) + max(itertools.accumulate(changes[moment] for moment in sorted(changes)), default=0)


def constant_bytes(model: onnx.ModelProto) -> int:
    """Return the bytes of the constants in a graph."""
    return sum(math.prod(value.dims) * _itemsize(value.data_type) for value in model.graph.initializer)


def sort_as_run(graph: onnx.GraphProto) -> None:
    """Sort the nodes into the order in which ONNX Runtime runs them.

    The order is depth-first from the last node without readers back to its inputs (``Graph::ReverseDFSFrom``).
    """
    nodes = list(graph.node)
    maker = {name: index for index, node in enumerate(nodes) for name in node.output}
    needs = [sorted({maker[name] for name in node.input if name in maker}) for node in nodes]
    needed = {index for each in needs for index in each}
    stack = [(index, False) for index in range(len(nodes)) if index not in needed]
    seen: set[int] = set()
    order = []
    while stack:
        index, done = stack.pop()
        if done:
            order.append(nodes[index])
        elif index not in seen:
            seen.add(index)
            stack.append((index, True))
            stack.extend((other, False) for other in needs[index] if other not in seen)
    del graph.node[:]
    graph.node.extend(order)


_Like: TypeAlias = tuple[tuple[int, ...], int]
"""Shape, and bytes of one element."""


@dataclass
class _Buffer:
    """Buffer that holds one or several tensors, one after another, from its first node to its last."""

    like: _Like
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        shape, itemsize = self.like
        return math.prod(shape) * itemsize


@dataclass
class _Plan:
    """State of the allocation planner during its pass over the nodes."""

    likes: Mapping[str, _Like]
    uses: Counter[str]
    outside: set[str]
    """Names of values whose memory is outside the step's arena."""
    buffers: list[_Buffer] = field(default_factory=list)
    home: dict[str, int] = field(default_factory=dict)
    """Index of the buffer of each value, by name."""
    left: Counter[int] = field(default_factory=Counter)
    """Number of remaining reads of the tensor in each buffer."""
    free: list[int] = field(default_factory=list)
    """Indices of freed buffers, the most recently freed first."""

    def add(self, node: onnx.NodeProto, moment: int) -> None:
        """Assign buffers to the node's outputs, then free the buffers of inputs that were read for the last time."""
        made = [name for name in node.output if name and name not in self.outside]
        for name in made:
            buffer = self._find_buffer(node, self.likes[name], moment)
            if buffer is not None:
                self.home[name] = buffer
                self.left[buffer] += self.uses[name]
        for name in (name for name in node.input if name in self.home):
            self.left[self.home[name]] -= 1
            self._release(self.home[name], moment)
        for name in (name for name in made if name in self.home):
            self._release(self.home[name], moment)

    def _release(self, buffer: int, moment: int) -> None:
        """Keep a buffer up to this node, and free it if nothing reads it later."""
        self.buffers[buffer].last = moment
        if not self.left[buffer] and self.free[:1] != [buffer]:
            self.free.insert(0, buffer)

    def _find_buffer(self, node: onnx.NodeProto, like: _Like, moment: int) -> int | None:
        """Return the index of the buffer for an output of the node; None for memory outside the arena."""
        if node.op_type in _VIEWS:
            return self.home.get(node.input[0])
        # the buffer of an input that nothing else reads
        if node.op_type in _IN_PLACE:
            buffer = self.home.get(node.input[0])
            if buffer is not None and self.left[buffer] == 1 and self.likes[node.input[0]] == like:
                return buffer
        # a freed buffer
        if like[0]:
            for buffer in self.free:
                if self.buffers[buffer].like == like:
                    self.free.remove(buffer)
                    return buffer
        self.buffers.append(_Buffer(like, moment, moment))
        return len(self.buffers) - 1


def _itemsize(kind: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(kind).itemsize)


MEASURED = "ONNX Runtime's own count of its arena, from its profile; weights, state, batch, outputs and constants added"
"""Note of a measured row: the source of its bytes."""
PREDICTED = "ONNX Runtime's allocation planner replayed over the graph that it runs; no scratch inside operators"
"""Note of a predicted row: the source of its bytes."""

_FIGURES = ("mem_bytes_requested_in_use", "mem_in_use_peak", "mem_arena_held")


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
        inputs, outputs = (
            {port.name: torch.zeros(port.shape, dtype=port.dtype) for port in ports}
            for ports in (exported.inputs, exported.outputs)
        )
        inputs.update((scalar, torch.ones(())) for scalar in exported.scalars)
        # weights, statistics, state, batch, buffers for outputs, and constants stay from step to step
        always = sum(each.nbytes for each in (*inputs.values(), *outputs.values())) + constant_bytes(onnx.load(path))
        binding = bind(session, inputs, outputs)
        for _ in range(2):
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
    kinds: Counter[str] = Counter()
    for port in exported.inputs:
        kinds[port.name.partition(":")[0]] += port.nbytes
    made = sum(port.nbytes for port in exported.outputs) + 4 * len(exported.scalars)
    terms = (
        *(Term(kind, nbytes) for kind, nbytes in kinds.items()),
        Term("outputs", made, "new weights and state are written beside the old ones"),
        Term("tensors of the step", planned_peak(_as_run(exported.model, optimized, name)), PREDICTED),
    )
    peak = sum(term.nbytes for term in terms)
    return Memory(tensor_bytes=peak, peak_bytes=peak), terms


def _as_run(model: onnx.ModelProto, optimized: bool, name: str) -> onnx.ModelProto:
    """Return the graph as ONNX Runtime runs it, in its order, with the shapes of all values."""
    shaped: onnx.ModelProto = onnx.shape_inference.infer_shapes(model)
    if not optimized:
        sort_as_run(shaped.graph)
        return shaped
    with tempfile.TemporaryDirectory(prefix="magis-ort-") as folder:
        path = Path(folder) / "optimized.onnx"
        open_session(model, optimized=True, name=name, optimized_path=path)
        run = onnx.load(path)
    made = {value for node in run.graph.node for value in node.output}
    run.graph.value_info.extend(value for value in shaped.graph.value_info if value.name in made)
    run = onnx.shape_inference.infer_shapes(run)
    # If there is no half-precision kernel, ONNX Runtime inserts operators of its own, which ONNX does not know; each
    # float32 value that they make is named after the half-precision value of the same shape.
    known = {value.name for value in (*run.graph.input, *run.graph.output, *run.graph.value_info)}
    for value in (*shaped.graph.output, *shaped.graph.value_info):
        uncast = f"InsertedPrecisionFreeCast_{value.name}"
        if uncast in made and uncast not in known:
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            run.graph.value_info.append(helper.make_tensor_value_info(uncast, onnx.TensorProto.FLOAT, sizes))
    return run
