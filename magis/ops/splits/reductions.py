"""Split rules of element-wise operators, reductions, and operators along one dimension.

sum(a, [1]): (x, y) -> (x); y combines by "sum" softmax(a, -1): (x, y) -> (x, y), not y
"""

from __future__ import annotations

from magis.ops.splits.labels import LabelledCall, Labels, aligned, broadcast, numbered, wrapped

# Element-wise operators, in-place variants included, and factories.
#
#     add(a, b):  a: (..., x), b: (..., x or 1) -> (..., x)
#     full([x, y], number) -> (x, y), the sizes are literals
#
# Every dimension can be split; an input that is broadcast along it is taken whole.


def pointwise(call: LabelledCall) -> Labels | str:
    """Label every dimension of an element-wise result; an input of size 1 is broadcast."""
    made = [output for output in call.outputs if output is not None]
    common = broadcast([value.shape for value in (*call.tensors.values(), *made) if value.numel])
    if common is None:
        return "tensors of several shapes"
    if not any(output.numel for output in made):
        return "no elements"
    labels = numbered(common)
    return Labels(
        inputs={path: aligned(value.shape, common, labels) for path, value in call.tensors.items()},
        outputs=[() if output is None else aligned(output.shape, common, labels) for output in call.outputs],
    )


def factory(call: LabelledCall) -> Labels | str:
    """Label all dimensions of a factory (`full`, `new_zeros`), whose sizes are literals.

    A tensor that only lends its type is cut alike where its sizes agree: the backward of a `gather` begins so.
    """
    if not call.name.startswith("new_"):
        return _sizes_as_literals(call, 0)
    labels = _sizes_as_literals(call, 1)
    if isinstance(labels, str):
        return labels
    sizes = zip(call.shape(0), call.shape_of_output(), labels.outputs[0], strict=False)
    taken = [label if lent == size else None for lent, size, label in sizes]
    taken += [None] * (len(call.shape(0)) - len(taken))
    return Labels({(0,): taken}, labels.outputs, labels.literals)


def strided(call: LabelledCall) -> Labels | str:
    """Label the outermost dimension of `empty_strided`: the others would change the literal strides."""
    position = int(call.name.startswith("new_"))
    sizes, steps = call.integers(position), call.integers(position + 1)
    labels = _sizes_as_literals(call, position)
    if isinstance(labels, str) or len(sizes) != len(steps) or not sizes:
        return "strides are literals"
    real = [index for index, size in enumerate(sizes) if size > 1]
    outer = max(real, key=lambda index: steps[index], default=0)
    if any(steps[index] * sizes[index] > steps[outer] for index in real if index != outer):
        return "strides are literals"
    dims = [label if index == outer else None for index, label in enumerate(labels.outputs[0])]
    return Labels({}, [dims], labels.literals)


def _sizes_as_literals(call: LabelledCall, position: int) -> Labels | str:
    sizes = call.shape_of_output()
    (where,) = call.at(position, "size")
    if len(call.integers(position, "size")) != len(sizes):
        return "sizes are no literals"
    labels = numbered(sizes)
    return Labels({}, [labels], {(where, index): label for index, label in enumerate(labels) if label is not None})


def reduction(call: LabelledCall) -> Labels | str:
    """Label kept dimensions of a reduction, and reduced ones if results of parts combine."""
    shape, made = call.shape(0), call.shape_of_output()
    # The reduced dimensions: inferred from shapes if the call names none.
    gone = {wrapped(dim, len(shape)) for dim in call.integers(call.info.dim, "dim")}
    if not gone and made in ((), (1,) * len(shape)):
        gone = set(range(len(shape)))
    keeps = len(made) == len(shape)
    if made != tuple(1 if index in gone else size for index, size in enumerate(shape) if keeps or index not in gone):
        return "which dimensions are reduced is not in the call"
    # How results of parts combine; None if they do not.
    how = call.info.combines or None
    if call.name in ("max", "min") and call.overload != "default":
        how = None
    elif call.name == "linalg_vector_norm":
        order = call.arg(1, "ord", 2)
        orders = {1: "sum", float("inf"): "max", float("-inf"): "min"}
        how = orders.get(order) if isinstance(order, int | float) else None
    labels = numbered(shape)
    kept = [label for index, label in enumerate(labels) if index not in gone]
    if keeps:
        kept = [None if index in gone else label for index, label in enumerate(labels)]
    combine = {} if how is None else {f"d{index}": how for index in gone}
    coupled = "every result depends on the whole dimension"
    return Labels({(0,): labels}, [kept] * len(call.outputs), combine=combine, reason=coupled)


def along(call: LabelledCall) -> Labels | str:
    """Label all dimensions except those that the operator works along (softmax, cumsum), whose sizes may change."""
    labels = numbered(call.shape(0), call.integers(call.info.dim, "dim") or (-1,))
    inputs = {path: labels for path, value in call.tensors.items() if len(value.shape) == len(labels)}
    return Labels(inputs, [labels] * len(call.outputs), reason="every result depends on the whole dimension")


def extremum(call: LabelledCall) -> Labels | str:
    """Label `max` and `min`: of two tensors, of all elements, or along a dimension with indices."""
    if call.overload == "other":
        return pointwise(call)
    return reduction(call)


def flipped(call: LabelledCall) -> Labels | str:
    """Label all dimensions except those that are flipped or rolled; none for a `roll` over all."""
    dims = call.integers(call.info.dim, "dims")
    if call.name == "roll" and not dims:
        return "elements move across all dimensions"
    labels = numbered(call.shape(0), dims)
    return Labels({(0,): labels}, [labels], reason="elements move along the dimension")


def triangle(call: LabelledCall) -> Labels | str:
    """Label batch dimensions of `tril` and `triu`, whose elements depend on row and column."""
    labels = numbered(call.shape(0), (-1, -2))
    return Labels({(0,): labels}, [labels], reason="the triangle is fixed by positions")
