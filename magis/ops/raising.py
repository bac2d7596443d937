"""Operators that may raise within a step: users' custom operators, and kernels that check contents of tensors.

A weight that was updated before an operator raises cannot be restored, so plans update behind all such operators.
Out-of-memory errors, which any operator may raise, are ignored here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from magis.graph.hazards import is_pure_view
from magis.graph.nodes import Arg, Graph, Op, Ref, Value
from magis.ops.call import only_acts, resolve, shaped_by_contents

_OURS = ("aten", "prims", "magis", "_c10d_functional")
_KERNELS = """
    _assert_async _assert_scalar _ctc_loss _embedding_bag _embedding_bag_forward_only _linalg_check_errors
    _linalg_eigh _linalg_solve_ex _linalg_svd _local_scalar_dense _pack_padded_sequence _sample_dirichlet
    _standard_gamma bernoulli.default bernoulli.Tensor binary_cross_entropy bincount binomial cholesky cholesky_inverse
    fake_quantize_per_channel_affine fake_quantize_per_channel_affine_cachemask geqrf histc item linalg_cholesky_ex
    linalg_eig linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu_factor_ex linalg_qr masked_scatter
    max_unpool2d max_unpool3d multinomial normal.float_Tensor normal.Tensor_Tensor ormqr poisson put repeat_interleave
    segment_reduce take
    """
_ON_CONTENTS = frozenset(_KERNELS.split())
"""Kernels, or overloads of kernels, that raise for some contents of their input tensors."""
_DIVIDES = ("div", "floor_divide", "fmod", "remainder")
"""Kernels that raise for zero divisors in integer tensors."""
_ALONG = ("index_select", "gather", "scatter", "index_add", "index_copy", "index_fill", "index_reduce")
"""Prefixes of the names of kernels that index one dimension of their first argument."""
_CLASSES = ("nll_loss", "multi_margin_loss", "multilabel_margin_loss")
_ROWS = ("embedding", "_embedding_bag_dense_backward")
_SEVERAL = ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put")
_FINDERS = "argmax argmin argsort cummax cummin kthvalue max median min mode nanmedian sort topk"
_FINDS = frozenset(_FINDERS.split())
"""Kernels that return indices along a dimension, which are always in range for it."""

Contents: TypeAlias = tuple[int, int]
"""Storage and version: one state of the storage's contents."""


def may_raise(graph: Graph) -> dict[int, str]:
    """Return forward and backward operators that may raise by contents or in a user's code (id -> target).

    Recomputations are left out, and lookups by indices that an earlier operator has checked against the same size.
    """
    seen, first = _CheckedIndices({}, {}), dict[tuple[bool, int], Op]()
    found: dict[int, str] = {}
    for op in graph.ops:
        if op.phase == "update":
            continue
        before = first.setdefault((False, op.id) if op.origin is None else (True, op.origin), op)
        if before is not op:  # a recomputation of its outputs
            for copy, made in zip(op.made(), before.made(), strict=False):
                seen.same.setdefault(graph.values[copy].storage, seen.contents(before, graph.values[made]))
        elif op.target in ("magis.store", "magis.load"):
            seen.copied(op, graph.values)
        elif seen.raises(op, graph.values):
            found[op.id] = op.target
    return found


def undone(graph: Graph) -> Mapping[str, int] | None:
    """Return the bytes of graph inputs that a step writes before its update, by name; None if no operator may raise."""
    if not may_raise(graph):
        return None
    written = {storage for op in graph.ops if op.phase != "update" for storage, _ in op.writes}
    named = {graph.values[value].storage: graph.values[value].name for value in graph.inputs}
    return {named[storage]: graph.storages[storage].nbytes for storage in sorted(written) if storage in named}


def updates_last(graph: Graph) -> Graph:
    """Return the step with all weight updates moved after forward and backward."""
    late = [op for op in graph.ops if op.phase == "update"]
    return replace(graph, ops=(*(op for op in graph.ops if op.phase != "update"), *late))


def torn_by(graph: Graph) -> str:
    """Name operators that may raise after some weights but not all are updated, with "running out of memory"; "" if
    none."""
    updates = [position for position, op in enumerate(graph.ops) if op.phase == "update" and op.writes]
    others = [
        position for position, op in enumerate(graph.ops) if op.phase != "update" and not is_pure_view(graph.values, op)
    ]
    if not updates or not others or updates[0] > others[-1]:
        return ""
    raising = may_raise(graph)
    late = dict.fromkeys(raising[op.id] for op in graph.ops[updates[0] :] if op.id in raising)
    return " or ".join((*late, "running out of memory"))


class _CheckedIndices:
    """Indices known to be in range: checked or made by the operators so far."""

    def __init__(self, places: dict[tuple[Contents, int], int], same: dict[int, Contents]) -> None:
        self._places = places
        """(Contents, size of the indexed dimension) -> number of indices known to be in range."""
        self.same = same
        """Storage -> contents (of another storage) that it copies or is a part of."""

    def contents(self, op: Op, value: Value) -> Contents:
        """Return the contents that an operator reads from a value, traced back through copies."""
        return self.same.get(value.storage, (value.storage, dict(op.reads).get(value.storage, 0)))

    def copied(self, op: Op, values: Mapping[int, Value]) -> None:
        """Record that the operator's outputs hold the contents of its first input."""
        taken = self.contents(op, values[op.inputs()[0]])
        for made in op.made():
            if values[made].storage != taken[0]:
                self.same[values[made].storage] = taken

    def raises(self, op: Op, values: Mapping[int, Value]) -> bool:
        """Return True if the operator, or one in its loop, may raise; record the indices that it checks or makes."""
        if op.body is not None:
            inside, around = op.body.graph, (*op.inputs(), *op.made())
            same = {
                inside.values[value].storage: self.contents(op, values[outer])
                for value, outer in zip(inside.inputs, around, strict=True)
            }
            body, found = _CheckedIndices(self._places, same), False
            for each in inside.ops:
                if each.target == "magis.part":
                    body.copied(each, inside.values)
                else:
                    found = body.raises(each, inside.values) or found
            return found
        namespace, name, *overload = op.target.split(".")
        if namespace not in _OURS or only_acts(op.target) or shaped_by_contents(op, values):
            return True
        name = name.removesuffix("_")
        if namespace != "aten" or (not op.inputs() and name not in _ON_CONTENTS):
            return False
        if name in _DIVIDES:
            return all(values[value].dtype[0] in "iub" and values[value].dtype != "bfloat16" for value in op.inputs())
        new = False
        for value, places in _index_bounds(op, name, values):
            key = self.contents(op, value), places
            new = new or self._places.get(key, -1) < value.numel
            self._places[key] = max(self._places.get(key, 0), value.numel)
        self._note_returned_indices(op, name, values)
        return new or name in _ON_CONTENTS or f"{name}.{overload[0]}" in _ON_CONTENTS

    def _note_returned_indices(self, op: Op, name: str, values: Mapping[int, Value]) -> None:
        if name not in _FINDS:
            return
        whole, dim = _tensor_argument(op, "self", values), _argument(op, "dim")
        if whole is None or not whole.shape or not isinstance(dim, int):
            return
        for made in (values[value] for value in op.made()):
            if made.dtype == "int64" and made.storage != whole.storage:
                self._places[(made.storage, 0), whole.shape[dim]] = made.numel


def _index_bounds(op: Op, name: str, values: Mapping[int, Value]) -> Iterator[tuple[Value, int]]:
    """Yield pairs (integer tensor used as indices, size that bounds the indices) of a kernel."""
    if not name.startswith((*_ALONG, *_CLASSES, *_ROWS)) and name not in _SEVERAL:
        return
    whole = _tensor_argument(op, "self", values) or _tensor_argument(op, "weight", values)
    index = (
        _tensor_argument(op, "index", values)
        or _tensor_argument(op, "indices", values)
        or _tensor_argument(op, "target", values)
    )
    shape = (1,) if whole is None or not whole.shape else whole.shape
    dim, rows, several = (_argument(op, each) for each in ("dim", "num_weights", "indices"))
    if name in _SEVERAL and isinstance(several, tuple):
        at = 0
        for each in several:
            taken = values[each.value] if isinstance(each, Ref) else None
            if taken is not None and taken.dtype not in ("bool", "uint8"):
                yield taken, shape[at]
            at += len(taken.shape) if taken is not None and taken.dtype in ("bool", "uint8") else 1
    elif index is None:
        return
    elif name.startswith(_ALONG) and isinstance(dim, int):
        yield index, shape[dim]
    elif name.startswith(_ROWS):
        yield index, rows if isinstance(rows, int) else shape[0]
    elif name.startswith(_CLASSES):
        yield index, shape[1 if name.startswith("nll") and len(shape) > 1 else -1]


def _tensor_argument(op: Op, name: str, values: Mapping[int, Value]) -> Value | None:
    found = _argument(op, name)
    return values[found.value] if isinstance(found, Ref) else None


def _argument(op: Op, name: str) -> Arg:
    """Return a call's argument by its name in the schema, or its default if that is an int; else None."""
    for position, argument in enumerate(resolve(op.target)._schema.arguments):
        if argument.name == name:
            default = argument.default_value if isinstance(argument.default_value, int) else None
            return op.args[position] if position < len(op.args) else dict(op.kwargs).get(name, default)
    return None
