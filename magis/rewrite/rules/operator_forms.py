"""Operators of the pattern language: the calls that they match, and the calls that they emit.

    mm(a, b)         product of two matrices, or of two batches of matrices
    addmm(c, a, b)   c + a b, with a vector c along the last dimension
    conv(x, w)       convolution of images without groups or bias; convb(x, w, c) with a bias
    add, sub, mul    element-wise, of two tensors of one shape and dtype
    scale(x)         x times a number
    unary(x)         any element-wise call on one tensor; binary(a, b): on two of one shape
    t(x)             the last two dimensions swapped
    view(x)          a reshaping view
    cat, split       along a dimension; the pieces of a split are views

``conv``, ``scale``, ``unary``, ``binary`` and ``view`` keep the literals of the matched call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from magis.graph import Arg, Op, Ref, Value
from magis.ops.operators import op_info

ABSOLUTE = "aten.as_strided"
"""Prefix of operators that address memory, not dimensions."""

Values: TypeAlias = Mapping[int, Value]


@dataclass(frozen=True, slots=True)
class Seen:
    """A call as a pattern matches it.

    ``args`` are the input tensors; ``dim`` is negative. Calls with equal ``key`` differ only in their tensors.
    """

    args: tuple[int, ...]
    dim: int | None = None
    key: Hashable = None


Form: TypeAlias = Callable[[Op, Values], Seen | None]


def is_elementwise(op: Op) -> bool:
    """Return True if each element of the operator's result depends only on the same element of its inputs."""
    return op_info(op.target).elementwise and not op.many and not op.writes and not op.random


def _tensors(op: Op, count: int) -> tuple[int, ...] | None:
    """Return the inputs of a call that takes ``count`` tensors and nothing else; None for other calls."""
    found = tuple(arg.value for arg in op.args if isinstance(arg, Ref))
    return found if len(found) == len(op.args) == count and not op.kwargs else None


def _product(op: Op, _: Values) -> Seen | None:
    found = _tensors(op, 2) if op.target in ("aten.mm.default", "aten.bmm.default") else None
    return None if found is None else Seen(found, key=op.target)


def _addmm(op: Op, values: Values) -> Seen | None:
    found = _tensors(op, 3) if op.target == "aten.addmm.default" else None
    if found is None or len(values[found[0]].shape) != 1 or values[found[0]].shape != values[op.made()[0]].shape[1:]:
        return None
    return Seen(found)


def _conv(count: int) -> Form:
    """Return a matcher of convolutions of ``count`` tensors without groups, not transposed; literals and all sizes but
    batch and output channels must agree."""

    def see(op: Op, values: Values) -> Seen | None:
        if op.target != "aten.convolution.default" or op.kwargs or len(op.args) != 9 or len(op.inputs()) != count:
            return None
        if op.args[6] is not False or op.args[8] != 1:
            return None
        image, weight = (values[number] for number in op.inputs()[:2])
        if len(image.shape) != 4 or len(weight.shape) != 4:
            return None
        return Seen(op.inputs(), key=(op.args[3:], weight.shape[1:], image.shape[1:]))

    return see


def _has_complex(op: Op, values: Values) -> bool:
    """Return True if a tensor is complex: complex products round by the order of factors and by position."""
    return any(values[number].dtype.startswith("complex") for number in (*op.inputs(), *op.made()))


def _pair(target: str) -> Form:
    def see(op: Op, values: Values) -> Seen | None:
        found = _tensors(op, 2) if op.target == target else None
        if found is None:
            return None
        looks = {(values[number].shape, values[number].dtype) for number in (*found, *op.made())}
        if target == "aten.mul.Tensor" and _has_complex(op, values):
            return None
        return Seen(found) if len(looks) == 1 else None

    return see


def _scale(op: Op, values: Values) -> Seen | None:
    if op.target not in ("aten.mul.Scalar", "aten.mul.Tensor") or op.kwargs or len(op.args) != 2:
        return None
    tensor, number = op.args
    if not isinstance(tensor, Ref) or not isinstance(number, float):
        return None
    looks = values[tensor.value]
    if not looks.dtype.startswith(("float", "bfloat")) or looks.dtype != values[op.made()[0]].dtype:
        return None
    return Seen((tensor.value,), key=(op.target, repr(number)))


def _elementwise(count: int) -> Form:
    def see(op: Op, values: Values) -> Seen | None:
        if not is_elementwise(op) or len(op.made()) != 1 or len(op.inputs()) != count:
            return None
        shape = values[op.made()[0]].shape
        if any(values[number].shape != shape for number in op.inputs()) or any(isinstance(a, tuple) for a in op.args):
            return None
        if _has_complex(op, values):
            return None
        dtypes = tuple(values[number].dtype for number in op.inputs())
        literals = tuple(None if isinstance(a, Ref) else (a,) for a in op.args)
        named = tuple((name, None if isinstance(a, Ref) else (a,)) for name, a in op.kwargs)
        return Seen(op.inputs(), key=(op.target, repr((literals, named)), dtypes))

    return see


def _transpose(op: Op, values: Values) -> Seen | None:
    if op.kwargs or not op.inputs():
        return None
    rank = len(values[op.inputs()[0]].shape)
    if op.target == "aten.t.default" and rank == 2:
        return Seen(op.inputs())
    if op.target != "aten.transpose.int" or rank < 2:
        return None
    dims = {dim % rank for dim in op.args[1:] if isinstance(dim, int)}
    return Seen(op.inputs()) if dims == {rank - 2, rank - 1} else None


def _view(op: Op, values: Values) -> Seen | None:
    if op.target not in ("aten.view.default", "aten._unsafe_view.default") or op.kwargs:
        return None
    (tensor,) = op.inputs()
    return Seen((tensor,), key=(values[tensor].shape, op.args[1]))


def _cat(op: Op, values: Values) -> Seen | None:
    if op.target != "aten.cat.default" or op.kwargs or len(op.inputs()) < 2:
        return None
    looks = values[op.made()[0]]
    dim = op.args[1] if len(op.args) > 1 else 0
    rank = len(looks.shape)
    if not isinstance(dim, int) or any(values[n].dtype != looks.dtype for n in op.inputs()):
        return None
    if any(len(values[number].shape) != rank for number in op.inputs()):
        return None  # torch accepts empty 1-d tensors among tensors of another rank
    return Seen(op.inputs(), dim=dim % rank - rank)


def sizes_of_split(op: Op, values: Values) -> tuple[int, ...]:
    """Return the sizes of the pieces of a ``split`` call; () for other calls."""
    seen = _split(op, values)
    return () if seen is None or seen.dim is None else tuple(values[n].shape[seen.dim] for n in op.made())


def _split(op: Op, values: Values) -> Seen | None:
    if op.target not in ("aten.split.Tensor", "aten.split_with_sizes.default") or op.kwargs or None in op.outputs:
        return None
    (tensor,) = op.inputs()
    rank = len(values[tensor].shape)
    dim = op.args[2] if len(op.args) > 2 else 0
    if not isinstance(dim, int) or len(op.outputs) < 2:
        return None
    return Seen((tensor,), dim=dim % rank - rank)


FORMS: dict[str, Form] = {
    "mm": _product, "addmm": _addmm, "conv": _conv(2), "convb": _conv(3),
    "add": _pair("aten.add.Tensor"), "sub": _pair("aten.sub.Tensor"), "mul": _pair("aten.mul.Tensor"),
    "scale": _scale, "unary": _elementwise(1), "binary": _elementwise(2),
    "t": _transpose, "view": _view, "cat": _cat, "split": _split,
}  # fmt: skip
"""Operator of the pattern language -> function that matches a call."""

BRINGS_LITERALS = ("conv", "convb", "scale", "unary", "binary", "view")
"""Operators whose emitted calls keep the literals of a matched call."""


def made_like(op: Op, tensors: tuple[int, ...]) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Return target and arguments of a call with its tensors replaced."""
    rest = iter(tensors)

    def swapped(arg: Arg) -> Arg:
        return Ref(next(rest)) if isinstance(arg, Ref) else arg

    args = tuple(swapped(arg) for arg in op.args)
    return op.target, args, tuple((name, swapped(arg)) for name, arg in op.kwargs)


def made_call(
    form: str, tensors: tuple[int, ...], dim: int | None, values: Values, sizes: tuple[int, ...]
) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Return target and arguments of a new call of an operator that keeps no literals."""
    refs: tuple[Arg, ...] = tuple(Ref(number) for number in tensors)
    rank = len(values[tensors[0]].shape)
    where = (dim % rank,) if dim is not None and dim % rank else ()  # defaults are omitted, as torch does
    match form:
        case "mm":
            return ("aten.mm.default" if rank == 2 else "aten.bmm.default"), refs, ()
        case "addmm" | "add" | "sub" | "mul":
            return f"aten.{form}.{'default' if form == 'addmm' else 'Tensor'}", refs, ()
        case "t":
            return (
                ("aten.t.default", refs, ()) if rank == 2 else ("aten.transpose.int", (*refs, rank - 2, rank - 1), ())
            )
        case "cat":
            return "aten.cat.default", (refs, *where), ()
        case "split":
            return "aten.split_with_sizes.default", (*refs, sizes, *where), ()
        case _:
            raise KeyError(form)
