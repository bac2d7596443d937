"""Weights side by side in one storage, so that a product of several weights copies none of them in every step.

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
"""Prefix of the name of a merged weight among the graph's inputs; the names of the parts follow, in order."""


@dataclass(frozen=True, slots=True)
class Window:
    """Rows ``low`` to ``high`` of the input ``base``, its dimensions then permuted by ``dims``."""

    base: int
    low: int
    high: int
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a tensor that can be merged: ``rows`` of one shape ``row``, from element ``low`` on."""

    low: int
    rows: int
    row: tuple[int, ...]
    dims: tuple[int, ...]
    """Dimension of memory (outermost first) for each of the tensor's."""

    @property
    def high(self) -> int:
        return self.low + self.rows * prod(self.row)


def is_weight(storages: Mapping[int, Storage], value: Value) -> bool:
    """Return True if a tensor lies on a parameter."""
    return storages[value.storage].kind == "parameter"


def window_of(graph: Graph, values: Sequence[Value], dim: int) -> Window | None:
    """Find the window that shows tensors which lie side by side along ``dim`` already; None if they do not."""
    runs = _runs(values, dim)
    return _window_on(graph.values, graph.inputs, *runs[0]) if runs is not None and len(runs) == 1 else None


class Merging:
    """A graph whose weights are put side by side, many of them one after the other: tables of the operators that touch
    each storage save a walk through the step for each."""

    def __init__(self, graph: Graph) -> None:
        self._before = graph
        self.moves = 0
        """Number of times that storages have been put together."""
        self.values, self._storages = dict(graph.values), dict(graph.storages)
        self._inputs = list(graph.inputs)
        self._ops, self._slices = list(graph.ops), list[Op]()
        self._next = max(self.values) + 1, max(self._storages) + 1, max((op.id for op in graph.ops), default=0) + 1
        self._on: dict[int, list[int]] = {}  # storage -> its values
        for number, value in graph.values.items():
            self._on.setdefault(value.storage, []).append(number)
        self._touching: dict[int, list[int]] = {}  # storage -> positions of the operators that pin a version of it
        self._placing: set[int] = set()  # storages that calls meet which name absolute places
        for position, op in enumerate(graph.ops):
            for storage in {pair[0] for pair in (*op.reads, *op.writes)}:
                self._touching.setdefault(storage, []).append(position)
            if op.target.startswith((ABSOLUTE, "magis.")):
                self._placing.update(graph.values[value].storage for value in op.inputs())

    @property
    def storages(self) -> Mapping[int, Storage]:
        return self._storages

    def merge(self, values: Sequence[Value], dim: int) -> Window | None:
        """Put the tensors side by side along ``dim`` unless they lie so; None where they cannot."""
        runs = _runs(values, dim)
        if runs is None:
            return None
        if len(runs) > 1:
            storage = self._move_together(runs, values[0].dtype)
            if storage is None:
                return None
            runs = [(storage, replace(runs[0][1], low=0, rows=sum(layout.rows for _, layout in runs)))]
        on = self._on[runs[0][0]]
        return _window_on(self.values, [number for number in self._inputs if number in on], *runs[0])

    def graph(self) -> Graph:
        """Return the graph by now; the very same one if nothing lies elsewhere."""
        if not self.moves:
            return self._before
        ops, inputs = (*reversed(self._slices), *self._ops), tuple(self._inputs)
        return replace(self._before, storages=dict(self._storages), values=dict(self.values), ops=ops, inputs=inputs)

    def _move_together(self, runs: Sequence[tuple[int, _Layout]], dtype: str) -> int | None:
        """Move whole storages one behind the other into a new one; return that, None where they cannot be."""
        old = [storage for storage, _ in runs]
        if len(set(old)) < len(old) or any(self._storages[storage].kind != "parameter" for storage in old):
            return None
        size, row = ITEM_SIZE[dtype], runs[0][1].row
        if any(rows.low != 0 or rows.high * size != self._storages[storage].nbytes for storage, rows in runs):
            return None
        shown = [number for storage in old for number in self._on[storage]]
        if any(self.values[number].dtype != dtype for number in shown):
            return None  # offsets are counted in elements
        if not self._placing.isdisjoint(old):
            # a call that names an absolute place, which would be another one; a loop, whose body knows it; a swap
            return None
        given = [number for number in self._inputs if self.values[number].storage in old]
        merged = [number for number in given if self.values[number].name.startswith(MERGED)]
        if any(self.values[number].shape[1:] != row for number in merged):
            return None
        self.moves += 1
        value, new, call = self._next
        self._next = value + 1, new + 1, call + len(merged)
        shifts, shift = {}, 0
        for storage, rows in runs:
            shifts[storage] = shift
            shift += rows.high
        self._storages[new] = Storage(new, shift * size, "parameter")
        for number in shown:
            looks = self.values[number]
            self.values[number] = replace(looks, storage=new, offset=looks.offset + shifts[looks.storage])
        self._recount(old, new)
        for storage in old:
            del self._storages[storage], self._on[storage]
        parts = sorted((self.values[number].offset, number) for number in given if number not in merged)
        name = MERGED + ",".join(self.values[number].name for _, number in parts)
        stride = tuple(prod(row[at:]) for at in range(len(row) + 1))
        self.values[value] = Value(value, (shift // prod(row), *row), stride, dtype, new, 0, name)
        self._on[new] = [*shown, value]
        # Weights that were merged before are now windows on the rows of the larger one.
        for at, number in enumerate(merged):
            looks = self.values[number]
            low = looks.offset // prod(row)
            args = (Ref(value), 0, low, low + looks.shape[0])
            self.values[number] = replace(looks, name="")
            self._slices.append(Op(call + at, "aten.slice.Tensor", args, (), (number,)))
            self._inputs.remove(number)
        self._inputs.append(value)
        return new

    def _recount(self, old: Sequence[int], new: int) -> None:
        """Count the versions of the old storages together, in program order."""
        gone, version = frozenset(old), 0
        positions = sorted({position for storage in old for position in self._touching.pop(storage, ())})
        for position in positions:
            op = self._ops[position]
            reads = {pair for pair in op.reads if pair[0] not in gone}
            writes = {pair for pair in op.writes if pair[0] not in gone}
            if len(reads) < len(op.reads):
                reads.add((new, version))
            if len(writes) < len(op.writes):
                version += 1
                writes.add((new, version))
            self._ops[position] = replace(op, reads=tuple(sorted(reads)), writes=tuple(sorted(writes)))
        self._touching[new] = positions


def _runs(values: Sequence[Value], dim: int) -> list[tuple[int, _Layout]] | None:
    """List the storages and the rows of each that tensors side by side show one after the other; None if the layouts
    differ."""
    layouts = [_layout(value, dim) for value in values]
    first = layouts[0]
    if first is None or len({value.dtype for value in values}) > 1:
        return None
    known = [each for each in layouts if each is not None and (each.row, each.dims) == (first.row, first.dims)]
    if len(known) < len(values) or prod(first.row) == 0:
        return None
    runs: list[tuple[int, _Layout]] = []
    for value, layout in zip(values, known, strict=True):
        if runs and runs[-1][0] == value.storage:
            if runs[-1][1].high != layout.low:
                return None
            runs[-1] = (value.storage, replace(runs[-1][1], rows=runs[-1][1].rows + layout.rows))
        else:
            runs.append((value.storage, layout))
    return runs


def _layout(value: Value, dim: int) -> _Layout | None:
    """Read the tensor as rows in memory, one after another along ``dim``; None if it does not lie so, or shows its
    memory's conjugates or negatives."""
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


def _window_on(values: Mapping[int, Value], inputs: Sequence[int], storage: int, rows: _Layout) -> Window | None:
    """Find the window that shows the rows on an input: the merged weight, or a parameter that holds them all."""
    unit = prod(rows.row)
    for number in inputs:
        value = values[number]
        if value.storage != storage or not value.shape or value.shape[1:] != rows.row:
            continue
        own = _layout(value, 0)
        if own is None or own.dims != tuple(range(len(value.shape))):
            continue
        low, rest = divmod(rows.low - own.low, unit)
        if rest == 0 and low >= 0 and rows.high <= own.high:
            return Window(number, low, low + rows.rows, rows.dims)
    return None
