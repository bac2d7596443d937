"""Rows that a slice drops are not computed: the slice moves ahead of a matrix product, its gradient behind it.

    y = x @ w;  s = y[:, :-1]                              ->   x' = x[:, :-1];  s = x' @ w
    g = slice_backward(ds);  dw = g.T @ x;  dx = g @ w.T   ->   dw = ds.T @ x';  dx = slice_backward(ds @ w.T)

Language models drop the scores behind the last token so. A loop over the rows of the loss then covers the head, too.
Numbers differ in the last digits, as products have other sizes: only steps in parts use it. Where a dropped row holds
infinities, eager's gradient by the weight is no number (zero times infinity), while here the row is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from magis.cost.shapes import results
from magis.errors import VerifyError
from magis.graph import Arg, Const, Graph, Op, Ref, Storage, Value
from magis.graph.hazards import is_pure_view

_PRODUCTS = {"aten.mm.default": 0, "aten.addmm.default": 1}
"""Products of rows, and the position of the rows among the arguments."""
VIEWS = ("aten.view.default", "aten._unsafe_view.default")
_BY_ROW = frozenset(
    f"aten.{name}" for name in (
        "_to_copy.default", "clone.default", "neg.default", "mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar",
        "tanh.default",
    )
)  # fmt: skip
"""Operators on each element of one tensor; zeros stay zeros."""
_TANH_BACK = "aten.tanh_backward.default"
_SLICE, _BACK, _T = "aten.slice.Tensor", "aten.slice_backward.default", "aten.t.default"
_MM, _SUM = "aten.mm.default", "aten.sum.dim_IntList"


def with_short_rows(graph: Graph) -> Graph:
    """Return the step with slices of the rows of wide products ahead of these."""
    for number in [op.made()[0] for op in graph.ops if op.target == _SLICE and _takes_rows(op, graph.values)]:
        at = next(at for at, op in enumerate(graph.ops) if number in op.made())
        graph = _moved(graph, at)
    return graph


def _takes_rows(op: Op, values: Mapping[int, Value]) -> bool:
    """Return True for a slice of the last dimension but one."""
    shape, left = values[op.inputs()[0]].shape, values[op.made()[0]].shape
    dim = op.args[1] if len(op.args) > 1 else 0
    return len(shape) >= 2 and dim == len(shape) - 2 and left != shape and op.args[4:] in ((), (1,))


def _moved(graph: Graph, at: int) -> Graph:
    """Return the step with the slice at a position ahead of the product that makes the rows; as it is if none does."""
    found = _found(graph, at)
    if found is None:
        return graph
    moving = _Moving(graph, found, dict(graph.storages), dict(graph.values))
    try:
        moved = moving.step()
    except VerifyError:  # a view of other strides
        return graph
    return graph if moving.changed.intersection(graph.outputs) else moved


@dataclass(frozen=True)
class _Dropped:
    """A slice of the rows of a product, and all operators that work on these rows or on their gradients."""

    slice: Op
    lead: tuple[int, ...]
    """Dimensions of the sliced tensor ahead of its rows."""
    rows: int
    left: int
    """Rows that the slice leaves."""
    first: int
    """Position of the product."""
    chain: frozenset[int]
    """Positions of the operators between product and slice."""
    back: int
    """Position of the slice's gradient; -1 if it has none."""
    padded: frozenset[int]
    """Positions of the operators that take gradients padded with rows of zeros."""


def _found(graph: Graph, at: int) -> _Dropped | None:
    """Return what works on the rows that a slice takes; None unless all of that can do without the other rows."""
    op = graph.ops[at]
    (taken,), (made,) = op.inputs(), op.made()
    shape, left = graph.values[taken].shape, graph.values[made].shape
    chain = wide_product(graph, taken)
    if chain is None or not _folds(graph, chain[1], shape):
        return None
    first, between = chain
    backs = [p for p, each in enumerate(graph.ops) if each.target == _BACK and each.args[1:5] == (shape, *_ends(op))]
    scores = {value for position in (first, *between) for value in graph.ops[position].made()}
    # of equal slices of several passes, the first one has the last gradient
    known = ((back, _padded(graph, back, shape, scores)) for back in reversed(backs))
    back, padded = next(((back, found) for back, found in known if found is not None), (-1, frozenset[int]()))
    if backs and back < 0:
        return None
    own = {first, *between, *padded} | ({back} - {-1})
    ours = own | {at}
    inside = {value for position in own for value in graph.ops[position].made()}
    inside -= {value for position in padded for value in graph.ops[position].made() if _ends_there(graph.ops[position])}
    outer = {value for p, each in enumerate(graph.ops) if p not in ours for value in each.inputs()} | set(graph.outputs)
    touched = any(graph.ops[position].writes or graph.ops[position].random for position in ours)
    if touched or inside & outer:
        return None
    return _Dropped(op, shape[:-2], shape[-2], left[-2], first, frozenset(between), back, padded)


def _folds(graph: Graph, chain: list[int], shape: tuple[int, ...]) -> bool:
    """Return True if all tensors of a chain are scores of one shape, or matrices."""
    made = {graph.values[value].shape for position in chain for value in graph.ops[position].made()}
    return made <= {shape, (prod(shape[:-1]), shape[-1])}


def _ends(op: Op) -> tuple[Arg, ...]:
    """Return dimension, start and end of a slice."""
    return (*op.args[1:4], *((0, 0, 2**63 - 1)[len(op.args) - 1 :]))


def wide_product(graph: Graph, value: int) -> tuple[int, list[int]] | None:
    """Return the positions of the wide product that makes a tensor, and of the operators in between, by row each."""
    makers = {made: at for at, op in enumerate(graph.ops) for made in op.made()}
    shape = graph.values[value].shape
    between: list[int] = []
    while value in makers:
        at = makers[value]
        op, looks = graph.ops[at], graph.values[value]
        if looks.shape[-1:] != shape[-1:] or looks.numel != prod(shape):
            return None
        if op.target in _PRODUCTS:
            width = graph.values[op.inputs()[_PRODUCTS[op.target]]].shape[1]
            return (at, between) if width < shape[-1] and len(looks.shape) == 2 else None
        if op.target not in (*VIEWS, *_BY_ROW) or len(op.inputs()) != 1:
            return None
        between.append(at)
        (value,) = op.inputs()
    return None


def _padded(graph: Graph, back: int, shape: tuple[int, ...], scores: set[int]) -> frozenset[int] | None:
    """Return the positions of the operators that take a gradient padded with zeros, as far as the product's own
    gradients; None if another operator takes it."""
    rows = prod(shape[:-1])
    known, turned, found = set(graph.ops[back].made()), set[int](), set[int]()
    for at, op in enumerate(graph.ops):
        if known.isdisjoint(op.inputs()) and turned.isdisjoint(op.inputs()):
            continue
        (value, *others) = op.inputs()
        size = graph.values[value].shape
        alone = not others and op.target in (*VIEWS, *_BY_ROW)
        if value in known and (alone or (op.target == _TANH_BACK and others[0] in scores)):
            if graph.values[op.made()[0]].shape not in (shape, (rows, shape[-1])):
                return None
            known.update(op.made())
        elif value in known and op.target == _T:
            turned.update(op.made())
        elif not (
            (op.target == _MM and value in known and size == (rows, shape[-1]) and others[0] not in known | turned)
            or (op.target == _MM and value in turned and others[0] not in known | turned)
            or (op.target == _SUM and value in known and len(size) == 2 and op.args[1] in ((0,), (-2,)))
        ):
            return None
        found.add(at)
    return frozenset(found)


def _ends_there(op: Op) -> bool:
    """Return True for the product's own gradients, which others take."""
    return op.target in (_MM, _SUM)


@dataclass
class _Moving:
    """A step under construction, in which operators work on fewer rows."""

    graph: Graph
    found: _Dropped
    storages: dict[int, Storage]
    values: dict[int, Value]
    ops: list[Op] = field(default_factory=list)
    short: dict[int, int] = field(default_factory=dict)
    """Matrix of all rows -> matrix of those that the slice leaves."""
    changed: set[int] = field(default_factory=set)
    """Values of other sizes or strides than in the graph."""
    versions: dict[int, int] = field(default_factory=dict)

    def step(self) -> Graph:
        """Return the step."""
        found = self.found
        for at, op in enumerate(self.graph.ops):
            if at == found.first:
                self._product(op)
            elif op is found.slice or at == found.back:
                self._call(op, VIEWS[0], (Ref(op.inputs()[0]), self._shape(op.inputs()[0])), op.made()[0])
            elif at in found.chain or (at in found.padded and not _ends_there(op)):
                self._resized(op)
            elif at in found.padded:
                self._gradient(op)
            else:
                self._as_it_is(op)
        ops = tuple(replace(op, id=number) for number, op in enumerate(self.ops))
        used = {value for op in ops for value in (*op.inputs(), *op.made())} | {*self.graph.inputs, *self.graph.outputs}
        values = {number: value for number, value in self.values.items() if number in used}
        held = {value.storage for value in values.values()}
        storages = {n: s for n, s in self.storages.items() if n in held or s.kind != "temporary"}
        return replace(self.graph, storages=storages, values=values, ops=ops)

    def _shape(self, value: int) -> tuple[int, ...]:
        return (*self.found.lead, self.found.left, self.values[value].shape[-1])

    def _rows_of(self, value: int, like: Op) -> int:
        """Return the rows of a matrix that the slice leaves, as a matrix."""
        if value not in self.short:
            found, width = self.found, self.values[value].shape[1]
            folded = self._call(like, VIEWS[0], (Ref(value), (*found.lead, found.rows, width)))
            left = self._call(like, _SLICE, (Ref(folded), len(found.lead), *_ends(found.slice)[1:]))
            if prod(found.lead) > 1:
                kwargs = (("memory_format", Const("memory_format", "contiguous_format")),)
                left = self._call(like, "aten.clone.default", (Ref(left),), kwargs=kwargs)
            rows = prod(found.lead) * found.left
            self.short[value] = self._call(like, VIEWS[0], (Ref(left), (rows, width)))
        return self.short[value]

    def _product(self, op: Op) -> None:
        position = _PRODUCTS[op.target]
        rows = self._rows_of(op.inputs()[position], op)
        args = tuple(Ref(rows) if at == position else arg for at, arg in enumerate(op.args))
        self._call(op, op.target, args, op.made()[0], op.kwargs)

    def _resized(self, op: Op) -> None:
        """Emit an operator on fewer rows."""
        args = op.args
        if op.target in VIEWS:
            flat = len(self.graph.values[op.made()[0]].shape) == 2
            shape = self._shape(op.inputs()[0])
            args = (args[0], (prod(shape[:-1]), shape[-1]) if flat else shape)
        self._call(op, op.target, args, op.made()[0], op.kwargs)

    def _gradient(self, op: Op) -> None:
        """Emit a gradient of the product from fewer rows; that of the rows is padded with zeros."""
        found, (value, *others) = self.found, op.inputs()
        if op.target == _SUM or self.values[value].shape[0] == self.graph.values[value].shape[0]:
            args = op.args if op.target == _SUM else (op.args[0], Ref(self._rows_of(others[0], op)))
            self._call(op, op.target, args, op.made()[0], op.kwargs)
            return
        narrow = self._call(op, op.target, op.args)
        folded = self._call(op, VIEWS[0], (Ref(narrow), self._shape(narrow)))
        width = self.values[narrow].shape[-1]
        sizes = (*found.lead, found.rows, width)
        padded = self._call(op, _BACK, (Ref(folded), sizes, len(found.lead), *_ends(found.slice)[1:], 1))
        storage = self.graph.values[op.made()[0]].storage  # whose readers stay as they are
        del self.storages[self.values[padded].storage]
        self.values[padded] = replace(self.values[padded], storage=storage)
        self._call(op, VIEWS[0], (Ref(padded), (prod(found.lead) * found.rows, width)), op.made()[0])

    def _as_it_is(self, op: Op) -> None:
        """Append an operator that works on all that it did, with the strides of its results."""
        self.versions.update(op.writes)
        self.ops.append(op)
        if op.body is None and not self.changed.isdisjoint(op.inputs()):
            self._lay_out(op)

    def _call(
        self, like: Op, target: str, args: tuple[Arg, ...], made: int | None = None,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> int:  # fmt: skip
        """Append a call and return its result, which is a new value unless ``made`` says which."""
        if made is None:
            made, storage = max(self.values) + 1, max(self.storages) + 1
            self.values[made] = Value(made, (), (), "float32", storage)
            self.storages[storage] = Storage(storage, 0, "temporary")
        op = Op(
            0, target, args, kwargs, (made,), phase=like.phase, module=like.module, line=like.line
        )  # fmt: skip
        self._lay_out(op)
        if not is_pure_view(self.values, op):
            touched = sorted({self.values[value].storage for value in op.inputs()})
            op = replace(op, reads=tuple((storage, self.versions.get(storage, 0)) for storage in touched))
        self.ops.append(op)
        return made

    def _lay_out(self, op: Op) -> None:
        """Give the results of an operator the sizes and strides that it makes."""
        for looks, nbytes in results(op, self.values):
            if looks != self.values[looks.id]:
                self.values[looks.id] = looks
                self.changed.add(looks.id)
            if nbytes is not None:
                self.storages[looks.storage] = replace(self.storages[looks.storage], nbytes=nbytes)
