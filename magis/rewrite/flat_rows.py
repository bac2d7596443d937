"""Scores of several sequences as one matrix of rows, so that a loop can cut all rows alike.

    s = view(x @ w, (B, L, V));  l = log_softmax(s);  p = gather(l, i)      (B sequences of L tokens)
    s = x @ w;  l = log_softmax(s);  p = view(gather(l, view(i)), ...)      (one matrix of B * L rows)

With two sequences, a loop along the batch has two parts; rows of both together have as many parts as wanted. Each row
is computed by the same kernel from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from magis.cost.shapes import results
from magis.errors import VerifyError
from magis.graph import Arg, Const, Graph, Op, Ref, Storage, Value
from magis.graph.hazards import is_pure_view, row_major
from magis.ops.operators import op_info
from magis.rewrite.short_rows import VIEWS, wide_product

BY_ROW = ("aten._log_softmax.default", "aten._softmax.default", "aten.logsumexp.default")
"""Operators that losses begin with."""
_DIMS = {
    **dict.fromkeys((*BY_ROW, "aten.gather.default", "aten.sum.dim_IntList"), 1),
    **dict.fromkeys(("aten.amax.default", "aten.scatter_add_.default", "aten.scatter_add.default"), 1),
    **dict.fromkeys(("aten._log_softmax_backward_data.default", "aten._softmax_backward_data.default"), 2),
}
"""Operators along the last dimension, and the position of the dimension among the arguments."""
_COPIES = ("aten._to_copy.default", "aten.clone.default")
_MADE_WIDE = {"aten.full.default": 0, "aten.expand.default": 1}
"""Operators that make wide tensors, and the position of the shape among the arguments."""


def with_flat_rows(graph: Graph) -> Graph:
    """Return the step with scores of several sequences, up to their losses and back, as matrices."""
    for shape in dict.fromkeys(shape for op in graph.ops if op.target in BY_ROW for shape in _folded(graph, op)):
        flat = _Flattening(graph, shape, dict(graph.values))
        try:
            changed = flat.step()
        except VerifyError:  # a view of other strides
            continue
        graph = graph if flat.flat.intersection(graph.outputs) else changed
    return graph


def _folded(graph: Graph, op: Op) -> list[tuple[int, ...]]:
    """Return the shapes of more than two dimensions that scores have between their product and a softmax of theirs."""
    value = op.inputs()[0]
    shape = graph.values[value].shape
    if op.args[1] not in (last := len(shape) - 1, -1, (last,), (-1,)):
        return []
    chain = wide_product(graph, value)
    shapes = {shape} if chain is None else {shape, *(graph.values[graph.ops[at].made()[0]].shape for at in chain[1])}
    return [] if chain is None else sorted(each for each in shapes if len(each) > 2 and prod(each[:-2]) > 1)


@dataclass
class _Flattening:
    """A step under construction, in which tensors of one shape become matrices."""

    graph: Graph
    shape: tuple[int, ...]
    values: dict[int, Value]
    flat: set[int] = field(default_factory=set)
    """Values that are matrices now."""
    storages: dict[int, Storage] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    views: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    """Views of values in other shapes."""
    numbers: dict[int, int] = field(default_factory=dict)
    """One number per row in its old shape -> the same as an operator on rows makes it."""
    ops: list[Op] = field(default_factory=list)

    def step(self) -> Graph:
        """Return the step."""
        self.storages.update(self.graph.storages)
        for op in self.graph.ops:
            self.versions.update(op.writes)
            if not self._flattened(op):
                args, kwargs = (
                    self._folded_back(op, op.args),
                    tuple((k, self._folded_back(op, v)) for k, v in op.kwargs),
                )
                self.ops.append(replace(op, args=args, kwargs=kwargs))  # type: ignore[arg-type]
                self._follow_numbers(self.ops[-1])
        ops = tuple(replace(op, id=number) for number, op in enumerate(self.ops))
        return replace(self.graph, storages=self.storages, values=self.values, ops=ops)

    @property
    def _rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def _matrix(self) -> tuple[int, ...]:
        return (self._rows, self.shape[-1])

    def _flattened(self, op: Op) -> bool:
        """Emit an operator on rows; return False for others."""
        old, args = self.graph.values, list(op.args)
        wide = [value for value in op.made() if old[value].shape == self.shape]
        if op.random or op.phase == "update" or len(op.made()) != 1 or not (wide or self.flat & {*op.inputs()}):
            return False
        (made,) = op.made()
        if op.target in VIEWS:
            (value,) = op.inputs()
            shapes = {old[value].shape, old[made].shape}
            if shapes != {self.shape, self._matrix} and not (value in self.flat and shapes == {self.shape}):
                return False
            self._call_by_rows(op, (Ref(value), self._matrix), {made} & {*wide})
            return True
        if op.target in _MADE_WIDE:
            if not wide or args[_MADE_WIDE[op.target]] != self.shape:
                return False
            args[_MADE_WIDE[op.target]] = self._matrix
        elif op.target in _DIMS:
            dim = args[_DIMS[op.target]]
            if dim not in (last := len(self.shape) - 1, -1, (last,), (-1,)) or not (self.flat & {*op.inputs()}):
                return False
            args[_DIMS[op.target]] = (1,) if isinstance(dim, tuple) else 1
        elif not wide or not (op.target in _COPIES or op_info(op.target).elementwise):
            return False
        if any(self._by_rows(value) is None for value in op.inputs()):
            return False
        taken = {value: self._view(op, value, self._by_rows(value)) for value in op.inputs()}
        args = [Ref(taken[arg.value]) if isinstance(arg, Ref) else arg for arg in args]
        met = {self.values[value].storage for value in taken.values()}  # a copied column is another one
        copied = {(storage, 0) for storage in met - self.graph.storages.keys()}
        op = replace(op, reads=tuple(sorted({pair for pair in op.reads if pair[0] in met} | copied)))
        if wide:
            self._call_by_rows(op, tuple(args), {made})
            return True
        left = max(self.values) + 1  # numbers per row, whose readers stay as they are
        self.values[left] = replace(self.values[made], id=left)
        self._call_by_rows(replace(op, outputs=(left,)), tuple(args), {left})
        view = Op(
            0, VIEWS[0], (Ref(left), old[made].shape), (), (made,), phase=op.phase, module=op.module, line=op.line
        )
        self._call_by_rows(view, view.args, set())
        self.numbers[made] = left
        return True

    def _follow_numbers(self, op: Op) -> None:
        """Note a view that leaves numbers per row in their order."""
        lead = self.shape[:-1]
        if is_pure_view(self.values, op) and len(op.made()) == 1 and op.inputs()[0] in self.numbers:
            looks = self.values[op.made()[0]]
            if looks.shape in (lead, (*lead, 1)) and looks.stride == row_major(looks.shape):
                self.numbers[looks.id] = self.numbers[op.inputs()[0]]

    def _by_rows(self, value: int) -> tuple[int, ...] | None:
        """Return the shape in which an operator on rows takes a value; None if it cannot."""
        shape, stride = self.graph.values[value].shape, self.graph.values[value].stride
        if value in self.flat or shape in ((), self.shape[-1:]):
            return self.values[value].shape
        dense = stride == row_major(shape) or shape[-1:] == (1,)  # a column is copied
        return (self._rows, shape[-1]) if shape[:-1] == self.shape[:-1] and dense else None

    def _view(self, like: Op, value: int, shape: tuple[int, ...] | None) -> int:
        """Return a value in another shape."""
        if shape is None or self.values[value].shape == shape:
            return value
        if (value, shape) not in self.views:
            base = self.values[self.numbers.get(value, value)]
            if base.stride != row_major(base.shape):
                base = self._copied(like, base)
            looks = replace(base, id=max(self.values) + 1, shape=shape, stride=row_major(shape), name="")
            self.values[looks.id] = looks
            self.views[value, shape] = looks.id
            view = Op(0, VIEWS[0], (Ref(base.id), shape), (), (looks.id,))
            self.ops.append(replace(view, phase=like.phase, module=like.module, line=like.line))
        return self.views[value, shape]

    def _copied(self, like: Op, value: Value) -> Value:
        """Return a contiguous copy of a value."""
        storage = max(self.storages) + 1
        copied = Value(max(self.values) + 1, value.shape, row_major(value.shape), value.dtype, storage)
        self.values[copied.id] = copied
        self.storages[storage] = Storage(storage, copied.nbytes, "temporary")
        kwargs = (("memory_format", Const("memory_format", "contiguous_format")),)
        reads = ((value.storage, self.versions.get(value.storage, 0)),)
        copy = Op(0, "aten.clone.default", (Ref(value.id),), kwargs, (copied.id,), reads=reads)
        self.ops.append(replace(copy, phase=like.phase, module=like.module, line=like.line))
        return copied

    def _folded_back(self, op: Op, arg: Arg) -> Arg:
        """Return an argument with matrices in their old shape."""
        if isinstance(arg, Ref):
            return Ref(self._view(op, arg.value, self.shape)) if arg.value in self.flat else arg
        return tuple(self._folded_back(op, each) for each in arg) if isinstance(arg, tuple) else arg

    def _call_by_rows(self, op: Op, args: tuple[Arg, ...], flat: set[int]) -> None:
        """Append an operator whose results ``flat`` are matrices; others keep their looks."""
        op = replace(op, args=args)
        for looks, _ in results(op, self.values):
            known = self.values[looks.id]
            if looks.id in flat and (known.stride == row_major(known.shape) or op.target == "aten.expand.default"):
                self.values[looks.id] = looks
            elif looks != known:
                raise VerifyError(f"{op.target} makes other strides of rows")
        self.flat |= flat
        self.ops.append(op)
