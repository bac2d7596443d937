"""Reductions, and operators that work along one dimension.

sum(a, [1]):      (x, y) -> (x); y combines by "sum"
softmax(a, -1):   (x, y) -> (x, y), y not
"""

from __future__ import annotations

from magis.aten.splits.labels import Call, Labels, Rule, numbered, rows, wrapped
from magis.aten.splits.pointwise import pointwise

__all__ = ["RULES", "elementwise_along"]

_COMBINES = {
    "sum": "sum", "nansum": "sum", "count_nonzero": "sum", "mean": "mean", "amax": "max", "amin": "min",
    "any": "max", "all": "min",
}  # fmt: skip
"""How the results for parts of a reduced dimension become the whole's; the mean of equal parts' means is the mean."""


def reduction(call: Call) -> Labels | str:
    """Kept dimensions are cut; reduced ones where the operation combines with itself."""
    shape, made = call.shape(0), call.shape_of_output()
    gone = _reduced(call)
    if gone is None:
        return "which dimensions are reduced is not in the call"
    labels = numbered(shape)
    how = _combination(call)
    kept = [label for index, label in enumerate(labels) if index not in gone]
    if len(made) == len(shape):
        kept = [None if index in gone else label for index, label in enumerate(labels)]
    combine = {} if how is None else {f"d{index}": how for index in gone}
    coupled = "every result depends on the whole dimension"
    return Labels({(0,): labels}, [kept] * len(call.outputs), combine=combine, reason=coupled)


def _combination(call: Call) -> str | None:
    if call.name in ("max", "min"):
        return call.name if call.overload == "default" else None
    if call.name == "linalg_vector_norm":
        orders = {1: "sum", float("inf"): "max", float("-inf"): "min"}
        order = call.arg(1, "ord", 2)
        return orders.get(order) if isinstance(order, int | float) else None
    return _COMBINES.get(call.name)


def _reduced(call: Call) -> set[int] | None:
    """The reduced dimensions, as the shapes of input and result tell them where no dimension is named."""
    shape, made = call.shape(0), call.shape_of_output()
    asked = (
        {wrapped(dim, len(shape)) for dim in call.integers(_dim_position(call), "dim")} if _names_dims(call) else set()
    )
    keeps = len(made) == len(shape)
    if not asked and made in ((), (1,) * len(shape)):
        return set(range(len(shape)))
    expected = tuple(1 if index in asked else size for index, size in enumerate(shape) if keeps or index not in asked)
    return asked if expected == made else None


def _names_dims(call: Call) -> bool:
    """Whether the call may name dimensions; `var(x, True)` has a flag in their place."""
    return not isinstance(call.arg(_dim_position(call), "dim"), bool)


def _dim_position(call: Call) -> int:
    """After the order of a norm, and after the k of a k-th value."""
    return 2 if call.name in ("linalg_vector_norm", "norm", "kthvalue") else 1


def elementwise_along(position: int, keyword: str = "dim", default: int = -1) -> Rule:
    """A rule for inputs and outputs of one shape that are worked on along the dimension at `position`."""

    def rule(call: Call) -> Labels | str:
        labels = numbered(call.shape(0), (call.integer(position, keyword, default),))
        inputs = {path: labels for path, value in call.tensors.items() if len(value.shape) == len(labels)}
        return Labels(inputs, [labels] * len(call.outputs), reason="every result depends on the whole dimension")

    return rule


def extremum(call: Call) -> Labels | str:
    """`max` and `min`: of two tensors, of everything, or along a dimension together with where they are."""
    if call.overload == "other":
        return pointwise(call)
    return reduction(call)


def flipped(call: Call) -> Labels | str:
    """Elements change places along the named dimensions, all of them where a `roll` names none."""
    dims = call.integers(1 if call.name == "flip" else 2, "dims")
    if call.name == "roll" and not dims:
        return "elements move across all dimensions"
    labels = numbered(call.shape(0), dims)
    return Labels({(0,): labels}, [labels], reason="elements move along the dimension")


def transform(call: Call) -> Labels | str:
    """A Fourier transform: all but the transformed dimensions, one of which may change its size."""
    labels = numbered(call.shape(0), call.integers(1, "dim"))
    return Labels({(0,): labels}, [labels], reason="every result depends on the whole dimension")


def triangle(call: Call) -> Labels | str:
    """A triangle of every matrix: which elements belong to it depends on where they are."""
    labels = numbered(call.shape(0), (-1, -2))
    return Labels({(0,): labels}, [labels], reason="the triangle is fixed by positions")


def halves(call: Call) -> Labels | str:
    """`glu`: one half of a dimension gates the other."""
    position = 1 if call.name == "glu" else 2
    labels = numbered(call.shape(0), (call.integer(position, "dim", -1),))
    return Labels(dict.fromkeys(call.tensors, labels), [labels])


RULES: dict[str, Rule] = {
    **rows(reduction, "sum nansum mean amax amin any all prod var std var_mean std_mean logsumexp norm argmax argmin"),
    **rows(reduction, "linalg_vector_norm count_nonzero median mode aminmax nanmedian kthvalue"),
    **rows(extremum, "max min"),
    **rows(elementwise_along(1), "_softmax _log_softmax _safe_softmax cumsum cumprod"),
    **rows(elementwise_along(1), "logcumsumexp cummax cummin"),
    **rows(elementwise_along(1), "sort"),
    **rows(elementwise_along(2), "topk"),
    **rows(elementwise_along(2), "_softmax_backward_data _log_softmax_backward_data"),
    **rows(flipped, "flip roll"),
    **rows(transform, "_fft_r2c _fft_c2r _fft_c2c"),
    **rows(triangle, "tril triu"),
    **rows(halves, "glu glu_backward"),
}
