"""Merging of weights into one storage, so that a product of several weights need not copy them in every step.

    parameter:q [n, k], parameter:k [m, k]   ->   merged [n + m, k], with q and k as views of its first and last rows

Parameters stay separate for training, each with its optimizer state; only their memory moves, once, before the first
step (``magis.runtime.packed_weights``). Tensors can be merged if they have one dtype, are dense, have the concatenated
dimension outermost in memory, and agree in all others: along the first dimension of a linear layer's or a convolution's
weight or of a bias, or the last dimension of a transposed weight. A column-wise concatenation of row-major matrices
cannot be a view.

Since an in-place update of one part writes the common storage, its versions count writes to all parts: the update of
one part then waits for readers of the others, which is stricter than needed but correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from magis.graph import ITEM_SIZE, Graph, Op, Ref, Storage, Value
from magis.rewrite.rules.operator_forms import ABSOLUTE

MERGED = "merged:"
"""Prefix of a merged weight's name among the graph's inputs; the names of its parts follow, in order."""


@dataclass(frozen=True, slots=True)
class Window:
    """A view of rows ``low`` to ``high`` of the input ``base``, permuted by ``dims``."""

    base: int
    low: int
    high: int
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a mergeable tensor: ``rows`` of shape ``row``, from element ``low`` of its storage."""

    low: int
    rows: int
    row: tuple[int, ...]
    dims: tuple[int, ...]
    """For each dimension of the tensor, its rank in memory, outermost first."""

    @property
    def high(self) -> int:
        return self.low + self.rows * prod(self.row)


def is_weight(storages: Mapping[int, Storage], value: Value) -> bool:
    """Return True if a value lies on a parameter's storage."""
    return storages[value.storage].kind == "parameter"


def window_of(graph: Graph, values: Sequence[Value], dim: int) -> Window | None:
    """Return the window of tensors that are adjacent along ``dim`` already; None if they are not."""
    runs = _runs(values, dim)
    return _window_on(graph.values, graph.inputs, *runs[0]) if runs is not None and len(runs) == 1 else None


class Merging:
    """A graph whose weights are merged step by step; tables of the operators on each storage avoid walks through the
    graph."""

    def __init__(self, graph: Graph) -> None:
        self._before = graph
        self.moves = 0
        """Number of merges of storages so far."""
        self.values, self._storages = dict(graph.values), dict(graph.storages)
        self._inputs = list(graph.inputs)
        self._ops, self._slices = list(graph.ops), list[Op]()
        self._next = max(self.values) + 1, max(self._storages) + 1, max((op.id for op in graph.ops), default=0) + 1
        self._on: dict[int, list[int]] = {}  # storage -> its values
        for number, value in graph.values.items():
            self._on.setdefault(value.storage, []).append(number)
        self._touching: dict[int, list[int]] = {}  # storage -> positions of operators that read or write it
        self._placing: set[int] = set()  # storages of tensors whose address an operator depends on
        for position, op in enumerate(graph.ops):
            for storage in {pair[0] for pair in (*op.reads, *op.writes)}:
                self._touching.setdefault(storage, []).append(position)
            if op.target.startswith((ABSOLUTE, "magis.")):
                self._placing.update(graph.values[value].storage for value in op.inputs())

    @property
    def storages(self) -> Mapping[int, Storage]:
        return self._storages

    def merge(self, values: Sequence[Value], dim: int) -> Window | None:
        """Merge the tensors along ``dim`` unless they are adjacent; return their window, None if impossible."""
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
        """Return the graph with merged weights; the original object if nothing was merged."""
        if not self.moves:
            return self._before
        ops, inputs = (*reversed(self._slices), *self._ops), tuple(self._inputs)
        return replace(self._before, storages=dict(self._storages), values=dict(self.values), ops=ops, inputs=inputs)

    def _move_together(self, runs: Sequence[tuple[int, _Layout]], dtype: str) -> int | None:
        """Concatenate whole storages in a new one and return its id; None if that is impossible."""
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
            # an operator that depends on the address: `as_strided`, a loop, a swap
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
        """Renumber the versions of the old storages as versions of the new one, in program order."""
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
    """Return (storage, rows) for adjacent tensors in order, contiguous rows joined; None if the layouts differ."""
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
    """Return the tensor's layout as rows along ``dim``; None if ``dim`` is not outermost in dense memory, or lazy bits
    are set."""
    if value.bits:
        return None
    rank = len(value.shape)
    # Dimensions of size 1 may have any stride; the merged one counts as outermost among equals.
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
    """Return the window of the rows on the merged weight, or on a parameter that has them all; else None."""
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
