"""Peak bytes of a step, from the graph that ONNX Runtime runs, by the rules of its own allocation planner.

The rules are those of ONNX Runtime's ``allocation_planner.cc`` for one stream on the CPU: a tensor takes the memory of
an input that it may overwrite and that nobody reads later; else the memory freed last among those whose first tensor
had the same shape and element size; else memory of its own, which is freed after the last use of the last tensor that
lies in it. Scratch inside kernels is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import helper

from magis.errors import MagisError

__all__ = ["constant_bytes", "in_order", "planned_peak"]

_VIEWS = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
"""Their output is their first input, whoever else reads that."""
_IN_PLACE = frozenset(
    (
        *("Abs", "Cast", "Ceil", "Clip", "Elu", "Erf", "Exp", "Floor", "LeakyRelu", "Log", "Neg", "Reciprocal"),
        *("Relu", "Sigmoid", "Softplus", "Sqrt", "Tanh"),
    )
)
"""May overwrite their input where that has the same shape and element size and dies with them. (Operators with two
inputs might, too, and never do in ONNX Runtime 1.32: with them in this list no peak agrees, without them all do.)"""


def planned_peak(model: onnx.ModelProto) -> int:
    """The most bytes of tensors at once while the nodes run in the order in which they stand, beyond the model's inputs
    and outputs, constants included. Shapes must be known for every value."""
    graph = model.graph
    tensors = _tensors(graph)
    outside = {value.name for value in (*graph.input, *graph.output)} | {value.name for value in graph.initializer}
    uses = Counter(name for node in graph.node for name in _reads(node))
    uses.update(value.name for value in graph.output)
    plan = _Plan(tensors, uses, outside)
    for node in graph.node:
        plan.add(node)
    return constant_bytes(model) + _peak(plan.buffers)


def constant_bytes(model: onnx.ModelProto) -> int:
    """Bytes of the constants in a graph."""
    return sum(_bytes(value.dims, value.data_type) for value in model.graph.initializer)


def in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the nodes in the order in which ONNX Runtime runs them: depth first, from the last node whose outputs
    nobody reads back to what it needs (``Graph::ReverseDFSFrom``). What it has optimized it saves in that order.
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
    """Memory of one or several tensors, one after another."""

    like: tuple[tuple[int, ...], int]
    """Shape and element type of the first tensor in it."""
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return _bytes(*self.like)


@dataclass
class _Plan:
    """What the planner knows while it goes through the nodes."""

    tensors: Mapping[str, tuple[tuple[int, ...], int]]
    """Shape and element type by name."""
    uses: Counter[str]
    outside: set[str]
    """Names whose memory is not the step's."""
    buffers: list[_Buffer] = field(default_factory=list)
    home: dict[str, int] = field(default_factory=dict)
    """Name -> its buffer."""
    left: dict[int, int] = field(default_factory=dict)
    """Buffer -> reads to come of the tensor in it."""
    free: list[int] = field(default_factory=list)
    """Buffers nobody reads any more; the latest first."""
    now: int = 0

    def add(self, node: onnx.NodeProto) -> None:
        """Give the node's outputs memory, then let go of the inputs that were read for the last time."""
        reads = list(_reads(node))
        for name in filter(None, node.output):
            self._place(node, name, reads)
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

    def _place(self, node: onnx.NodeProto, name: str, reads: Sequence[str]) -> None:
        if name in self.outside:
            return
        shape, kind = self.tensors[name]
        source = self._shared(node, shape, kind, reads)
        if source == "outside":
            return
        if source is not None:
            buffer = self.home[source]
        else:
            found = self._freed(shape, kind)
            buffer = len(self.buffers) if found is None else found
            if found is None:
                self.buffers.append(_Buffer((shape, kind), self.now, self.now))
        self.home[name] = buffer
        self.left[buffer] = self.left.get(buffer, 0) + self.uses[name]

    def _shared(self, node: onnx.NodeProto, shape: tuple[int, ...], kind: int, reads: Sequence[str]) -> str | None:
        """The input in whose memory the output lies; "outside": one whose memory is not the step's."""
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

    def _freed(self, shape: tuple[int, ...], kind: int) -> int | None:
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
    """What a node reads, as often as it names it."""
    return (str(name) for name in node.input if name)


def _tensors(graph: onnx.GraphProto) -> dict[str, tuple[tuple[int, ...], int]]:
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
