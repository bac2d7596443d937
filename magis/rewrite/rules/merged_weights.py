"""Weights side by side in one storage: what a product of several weights reads without copying them in every step.

    parameter:q [n, k], parameter:k [m, k]   ->   merged [n + m, k], with q and k as windows on its first and last rows

The parameters stay what they are, trained one by one, each with its optimizer state; only the memory is another. It is
laid out once, before the first step (``magis.runtime.packed_weights``). Which layouts can be merged: tensors of one
data type whose elements are dense, with the dimension of the concatenation outermost in memory and all others alike.
That is the first dimension of a linear layer's or a convolution's weight and of a bias, and the last one of a
transposed weight. Anything else is refused: a column-wise concatenation of row-major matrices is no window on anything.

Since an in-place update of one part writes the common storage, versions are counted anew for all of them together: the
update of one then waits for the readers of the others, which is more than the numbers need and never less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from magis.graph import ITEM_SIZE, Graph, Op, Ref, Storage, Value
from magis.rewrite.rules.operator_forms import ABSOLUTE

MERGED = "merged:"
"""How the name of a merged weight among the graph's inputs begins; the names of the parts follow, in order."""


@dataclass(frozen=True, slots=True)
class Window:
    """Rows ``low`` to ``high`` of the input ``base``, its dimensions then permuted by ``dims``."""

    base: int
    low: int
    high: int
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How tensors that can be merged lie in memory: ``rows`` of one shape ``row``, from element ``low`` on."""

    low: int
    rows: int
    row: tuple[int, ...]
    dims: tuple[int, ...]
    """Dimension of memory (outermost first) for each of the tensor's."""

    @property
    def high(self) -> int:
        return self.low + self.rows * prod(self.row)


def is_weight(storages: Mapping[int, Storage], value: Value) -> bool:
    """Whether a tensor lies on a parameter."""
    return storages[value.storage].kind == "parameter"


def merge(graph: Graph, values: Sequence[Value], dim: int) -> tuple[Graph, Window] | None:
    """The graph with the tensors side by side along ``dim`` (from 0) in one storage, and the window that shows them.

    The very same graph where they lie so already. None where their layouts, or what else lies on their memory, forbid
    it.
    """
    layouts = [_layout(value, dim) for value in values]
    first = layouts[0]
    if first is None or len({value.dtype for value in values}) > 1:
        return None
    known = [each for each in layouts if each is not None and (each.row, each.dims) == (first.row, first.dims)]
    if len(known) < len(values) or prod(first.row) == 0:
        return None
    runs: list[tuple[int, _Layout]] = []  # storage, and the rows of it that follow one another
    for value, layout in zip(values, known, strict=True):
        if runs and runs[-1][0] == value.storage:
            if runs[-1][1].high != layout.low:
                return None
            runs[-1] = (value.storage, replace(runs[-1][1], rows=runs[-1][1].rows + layout.rows))
        else:
            runs.append((value.storage, layout))
    if len(runs) > 1:
        moved = _moved(graph, runs, values[0].dtype)
        if moved is None:
            return None
        graph, storage = moved
        runs = [(storage, replace(first, low=0, rows=sum(layout.rows for _, layout in runs)))]
    window = _shown(graph, *runs[0])
    return None if window is None else (graph, window)


def _layout(value: Value, dim: int) -> _Layout | None:
    """The tensor as rows in memory, one after another along ``dim``; None if it does not lie so, or shows its memory's
    conjugates or negatives."""
    if value.bits:
        return None
    rank = len(value.shape)
    # Dimensions of one element may have any stride; the one that is merged is outermost among equals.
    inner = sorted((d for d in range(rank) if d != dim), key=lambda d: (-value.stride[d], d))
    row = tuple(value.shape[d] for d in inner)
    step = 1
    for d in reversed(inner):
        if value.shape[d] > 1 and value.stride[d] != step:
            return None
        step *= value.shape[d]
    if value.shape[dim] > 1 and value.stride[dim] != step:
        return None
    memory = (dim, *inner)
    return _Layout(value.offset, value.shape[dim], row, tuple(memory.index(d) for d in range(rank)))


def _shown(graph: Graph, storage: int, rows: _Layout) -> Window | None:
    """The window on an input that shows the rows: of the merged weight, or of a parameter that holds them all."""
    unit = prod(rows.row)
    for number in graph.inputs:
        value = graph.values[number]
        if value.storage != storage or not value.shape or value.shape[1:] != rows.row:
            continue
        own = _layout(value, 0)
        if own is None or own.dims != tuple(range(len(value.shape))):
            continue
        low, rest = divmod(rows.low - own.low, unit)
        if rest == 0 and low >= 0 and rows.high <= own.high:
            return Window(number, low, low + rows.rows, rows.dims)
    return None


def _moved(graph: Graph, runs: Sequence[tuple[int, _Layout]], dtype: str) -> tuple[Graph, int] | None:
    """The graph with whole storages put one behind the other, and the new storage."""
    old = [storage for storage, _ in runs]
    if len(set(old)) < len(old) or any(graph.storages[storage].kind != "parameter" for storage in old):
        return None
    size = ITEM_SIZE[dtype]
    if any(rows.low != 0 or rows.high * size != graph.storages[storage].nbytes for storage, rows in runs):
        return None
    shown = {key: value for key, value in graph.values.items() if value.storage in old}
    if any(value.dtype != dtype for value in shown.values()):
        return None  # offsets are counted in elements
    if any(_places_itself(graph, op, old) for op in graph.ops):
        return None
    new = max(graph.storages) + 1
    shifts, shift = {}, 0
    for storage, rows in runs:
        shifts[storage] = shift
        shift += rows.high
    storages = {**graph.storages, new: Storage(new, shift * size, "parameter")}
    for each in old:
        del storages[each]
    moved = {key: replace(each, storage=new, offset=each.offset + shifts[each.storage]) for key, each in shown.items()}
    values = {**graph.values, **moved}
    number = max(values) + 1
    given = [key for key in graph.inputs if key in moved]
    parts = sorted((values[key].offset, key) for key in given if not _is_merged(values[key]))
    row = runs[0][1].row
    name = MERGED + ",".join(values[key].name for _, key in parts)
    stride = tuple(prod(row[at:]) for at in range(len(row) + 1))
    values[number] = Value(number, (shift // prod(row), *row), stride, dtype, new, 0, name)
    ops = list(_recounted(graph.ops, shifts, new))
    merged = [key for key in given if _is_merged(values[key])]
    inputs = [key for key in graph.inputs if key not in merged]
    next_id = max((op.id for op in graph.ops), default=0) + 1
    # What was merged before is now a window on the rows of the larger one.
    for at, key in enumerate(merged):
        value = values[key]
        low = value.offset // prod(row)
        args = (Ref(number), 0, low, low + value.shape[0])
        if value.shape[1:] != row:
            return None
        values[key] = replace(value, name="")
        ops.insert(0, Op(next_id + at, "aten.slice.Tensor", args, (), (key,)))
    return replace(graph, storages=storages, values=values, ops=tuple(ops), inputs=(*inputs, number)), new


def _is_merged(value: Value) -> bool:
    return value.name.startswith(MERGED)


def _places_itself(graph: Graph, op: Op, storages: Sequence[int]) -> bool:
    """Whether a call names an absolute place in one of the storages, which would be another one afterwards, or is a
    loop, whose body knows them, or a swap."""
    if not op.target.startswith((ABSOLUTE, "magis.")):
        return False
    return any(graph.values[value].storage in storages for value in op.inputs())


def _recounted(ops: Sequence[Op], shifts: Mapping[int, int], new: int) -> list[Op]:
    """The operators with the versions of the old storages counted together, in program order."""
    version, found = 0, list(ops)
    for at, op in enumerate(ops):
        if shifts.keys().isdisjoint(dict(op.reads)) and shifts.keys().isdisjoint(dict(op.writes)):
            continue
        reads = {pair for pair in op.reads if pair[0] not in shifts}
        writes = {pair for pair in op.writes if pair[0] not in shifts}
        if len(reads) < len(op.reads):
            reads.add((new, version))
        if len(writes) < len(op.writes):
            version += 1
            writes.add((new, version))
        found[at] = replace(op, reads=tuple(sorted(reads)), writes=tuple(sorted(writes)))
    return found
