"""Split rules of views.

    view([36], [3, 2, 6]):  (x) -> (x, -, -), the literal 3 is divided
    permute(a, [2, 0, 1]):  (x, y, z) -> (z, x, y)

The dimensions of a view form groups of equal products. Equal slices of a group's elements are equal slices of its
leading dimension larger than 1, on both sides; its other dimensions cannot be split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from magis.ops.operators import MEMORY
from magis.ops.splits.labels import LabelledCall, Labels, Path, aligned, numbered, wrapped


def groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the finest groups of dimensions (before, after) with equal products; dimensions of size 1 are left out.

    Both shapes must have equal numbers of elements, at least one.
    """
    left = [index for index, size in enumerate(before) if size > 1]
    right = [index for index, size in enumerate(after) if size > 1]
    while left and right:
        here, there = [left.pop(0)], [right.pop(0)]
        products = [before[here[0]], after[there[0]]]
        while products[0] != products[1]:
            if products[0] < products[1]:
                here.append(left.pop(0))
                products[0] *= before[here[-1]]
            else:
                there.append(right.pop(0))
                products[1] *= after[there[-1]]
        yield here, there


def view(call: LabelledCall) -> Labels | str:
    """Label the leading dimension of each group of a `view`; of a view as another dtype all but the last."""
    before, after = call.shape(0), call.shape_of_output()
    if call.overload == "dtype":  # another dtype: the innermost dimension changes its size
        labels = numbered(before, () if before == after else (-1,))
        return Labels({(0,): labels}, [labels])
    if 0 in before:
        return "no elements"
    taken, made = _leading(before, after)
    (where,) = call.at(1, "size")
    literals: dict[Path, str] = {(where, index): label for index, label in enumerate(made) if label is not None}
    sized = len(call.integers(1, "size")) == len(after)
    return Labels({(0,): taken}, [made], literals) if sized else "sizes are no literals"


def _leading(before: Sequence[int], after: Sequence[int]) -> tuple[list[str | None], list[str | None]]:
    """Return the labels before and after: one for the leading dimension of each group."""
    taken: list[str | None] = [None] * len(before)
    made: list[str | None] = [None] * len(after)
    for here, there in groups(before, after):
        taken[here[0]] = made[there[0]] = f"d{here[0]}"
    return taken, made


def flatten(call: LabelledCall) -> Labels | str:
    """Label the leading dimension of each group of a `flatten`, which has no size literals."""
    before, after = call.shape(0), call.shape_of_output()
    if 0 in before:
        return "no elements"
    taken, made = _leading(before, after)
    return Labels({(0,): taken}, [made])


def expand(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `expand`, whose sizes are literals; an input of size 1 is taken whole."""
    before, after = call.shape(0), call.shape_of_output()
    labels = numbered(after)
    (where,) = call.at(1, "size")
    if len(call.integers(1, "size")) != len(after):
        return "sizes are no literals"
    literals: dict[Path, str] = {(where, index): f"d{index}" for index in range(len(after))}
    return Labels({(0,): aligned(before, after, labels)}, [labels], literals)


def repeat(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `repeat`: parts take a slice of a dimension repeated once, else make fewer copies."""
    before, after = call.shape(0), call.shape_of_output()
    times = call.integers(1, "repeats")
    if len(times) != len(after):
        return "sizes are no literals"
    labels = numbered(after)
    skipped = len(after) - len(before)
    taken = [labels[index + skipped] if times[index + skipped] == 1 else None for index in range(len(before))]
    literals: dict[Path, str] = {(1, index): f"d{index}" for index, count in enumerate(times) if count != 1}
    return Labels({(0,): taken}, [labels], literals)


def rearranged(call: LabelledCall, source: Sequence[int | None], but: Sequence[int] = ()) -> Labels | str:
    """Label outputs whose dimension j is dimension `source[j]` of the input; None, and those in `but`, are not
    split."""
    labels = numbered(call.shape(0), but)
    if any(output is not None and len(output.shape) != len(source) for output in call.outputs):
        return "outputs of unexpected shape"
    made = [None if index is None else labels[index] for index in source]
    return Labels({(0,): labels}, [made] * len(call.outputs))


def permute(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `permute`."""
    rank = len(call.shape(0))
    return rearranged(call, [wrapped(dim, rank) for dim in call.integers(1, "dims")])


def transpose(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `transpose`, `t` and `numpy_T`."""
    order = list(range(len(call.shape(0))))
    if len(call.op.args) == 1:
        return rearranged(call, order[::-1])
    if order:
        first, second = (wrapped(call.integer(position), len(order)) for position in (1, 2))
        order[first], order[second] = order[second], order[first]
    return rearranged(call, order)


def movedim(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `movedim`."""
    rank = len(call.shape(0))
    origin, target = ([wrapped(dim, rank) for dim in call.integers(position)] for position in (1, 2))
    placed = dict(zip(target, origin, strict=True))
    rest = iter([dim for dim in range(rank) if dim not in origin])
    return rearranged(call, [placed[dim] if dim in placed else next(rest) for dim in range(rank)])


def unsqueeze(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `unsqueeze` but the new one."""
    rank = len(call.shape(0))
    order: list[int | None] = list(range(rank))
    order.insert(wrapped(call.integer(1, "dim"), rank + 1), None)
    return rearranged(call, order)


def squeeze(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `squeeze`; a part must not have size 1 in a dimension that it may remove."""
    shape = call.shape(0)
    asked = [wrapped(dim, len(shape)) for dim in call.integers(1, "dim")]
    asked = list(range(len(shape))) if call.overload == "default" else asked
    order = [index for index, size in enumerate(shape) if not (size == 1 and index in asked)]
    labels = rearranged(call, order)
    if isinstance(labels, str):
        return labels
    limits = {f"d{index}": _largest_proper_divisor(shape[index]) for index in asked if shape[index] > 1}
    return Labels(labels.inputs, labels.outputs, limits=limits)


def _largest_proper_divisor(number: int) -> int:
    smallest = next((factor for factor in range(2, int(number**0.5) + 1) if number % factor == 0), number)
    return number // smallest


def select(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `select` and `unbind` but the indexed one."""
    rank = len(call.shape(0))
    dim = wrapped(call.integer(1, "dim"), rank)
    return rearranged(call, [index for index in range(rank) if index != dim])


def window(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `slice` and `split` but theirs; a slice of the whole dimension keeps it."""
    shape = call.shape(0)
    dim = wrapped(call.integer(call.info.dim, "dim"), len(shape))
    # a slice may keep the whole dimension, by literals that mean the same for a shorter one
    end = call.arg(3, "end")
    reaches_end = end is None or (isinstance(end, int) and end >= shape[dim])
    whole = call.arg(2, "start") in (None, 0) and reaches_end and call.integer(4, "step", 1) == 1
    return rearranged(call, range(len(shape)), () if call.name.startswith("slice") and whole else (dim,))


def as_strided(call: LabelledCall) -> Labels | str:
    """Label the first dimension of an `as_strided` that returns the whole of a contiguous tensor: strides stay
    valid."""
    value = call.tensor(0)
    sizes, steps = call.integers(1, "size"), call.integers(2, "stride")
    if value is None or sizes != value.shape or steps != value.stride or call.arg(3, "storage_offset") is not None:
        return MEMORY
    expected = 1
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if step != expected:
            return MEMORY
        expected *= size
    labels = [label if index == 0 else None for index, label in enumerate(numbered(sizes))]
    return Labels({(0,): labels}, [labels], {(1, 0): "d0"}, reason=MEMORY)


def diagonal(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `diagonal` but its two."""
    rank = len(call.shape(0))
    gone = {wrapped(call.integer(2, "dim1"), rank), wrapped(call.integer(3, "dim2", 1), rank)}
    return rearranged(call, [*(index for index in range(rank) if index not in gone), None], tuple(gone))


def unfold(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `unfold` but the one with the windows."""
    rank = len(call.shape(0))
    dim = wrapped(call.integer(1, "dimension"), rank)
    return rearranged(call, [*range(rank), None], (dim,))


def complex_pairs(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `view_as_real` and `view_as_complex` but the pairs of the last one."""
    rank = len(call.shape(0))
    if call.name == "view_as_real":
        return rearranged(call, [*range(rank), None])
    return rearranged(call, range(rank - 1), (rank - 1,))
