"""Split rules of indexing, concatenation, padding, and writes to slices.

    embedding(weight, index):        (-, f), (x) -> (x, f)
    embedding_dense_backward(g, i):  (x, f), (x) -> (-, f); x sums
    cat([a, b], 1):                  (x, -), (x, -) -> (x, -)

Rows of an embedding are never split: an index may name any of them.
"""

from __future__ import annotations

from magis.graph.nodes import Value
from magis.ops.splits.labels import Dims, LabelledCall, Labels, Path, aligned, broadcast, numbered, wrapped

ANYWHERE = "an index may name any element"


# -- embedding -------------------------------------------------------------------------------------------------------


def embedding(call: LabelledCall) -> Labels | str:
    """Label indices and features of an embedding."""
    index = numbered(call.shape(1))
    return Labels({(0,): [None, "f"], (1,): index}, [[*index, "f"]])


def embedding_backward(call: LabelledCall) -> Labels | str:
    """Label features, and indices, whose gradients sum (not with `scale_grad_by_freq`, which counts all indices)."""
    index = numbered(call.shape(1))
    counted = call.arg(4, "scale_grad_by_freq", False) is not False
    combine = {} if counted else {label: "sum" for label in index if label is not None}
    return Labels({(0,): [*index, "f"], (1,): index}, [[None, "f"]], combine=combine)


# -- index tensors ---------------------------------------------------------------------------------------------------


def index_select(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `index_select`, where the indices replace one dimension of the source."""
    dim = wrapped(call.integer(1, "dim"), len(call.shape(0)))
    labels = numbered(call.shape(0))
    taken = [None if place == dim else label for place, label in enumerate(labels)]
    return Labels({(0,): taken, call.at(2, "index"): [f"d{dim}"]}, [labels])


def gather(call: LabelledCall) -> Labels | str:
    """Label every dimension of `gather`'s index; of the source those of equal size, except the indexed one."""
    source, index = call.shape(0), call.shape(2)
    dim = wrapped(call.integer(1, "dim"), len(source))
    if len(source) != len(index):
        return ANYWHERE
    labels = [
        label if place == dim or source[place] == index[place] else None for place, label in enumerate(numbered(index))
    ]
    taken = [None if place == dim else label for place, label in enumerate(labels)]
    return Labels({(0,): taken, (2,): labels}, [labels], reason=ANYWHERE)


def scatter(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `scatter` but the indexed one, if destination, index and source have equal sizes."""
    shapes = [value.shape for value in call.tensors.values() if value.shape]
    rank = len(call.shape(0))
    dim = wrapped(call.integer(1, "dim"), rank)
    if any(len(shape) != rank for shape in shapes):
        return ANYWHERE
    labels = [
        None if place == dim or len({shape[place] for shape in shapes}) > 1 else label
        for place, label in enumerate(numbered(call.shape(0)))
    ]
    inputs = {path: labels if value.shape else [] for path, value in call.tensors.items()}
    return Labels(inputs, [labels], reason=ANYWHERE)


def index_along(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `index_add` and its kin but the indexed one."""
    rank = len(call.shape(0))
    dim = wrapped(call.integer(1, "dim"), rank)
    labels = numbered(call.shape(0), (dim,))
    inputs = {path: labels for path, value in call.tensors.items() if len(value.shape) == rank and path != (2,)}
    return Labels(inputs, [labels], reason=ANYWHERE)


def index(call: LabelledCall) -> Labels | str:
    """Label dimensions of `a[i, :, j]` without an index, and those of the indices."""
    layout = _indexed(call)
    if isinstance(layout, str):
        return layout
    source, made, common, labels = layout
    indices: dict[Path, Dims] = {
        path: aligned(value.shape, common, labels) for path, value in call.tensors.items() if path[0] == 1
    }
    return Labels({(0,): source, **indices}, [made])


def index_put(call: LabelledCall) -> Labels | str:
    """Label dimensions of `a[i, :, j] = v` without an index; along the others any element may be written."""
    layout = _indexed(call)
    if isinstance(layout, str):
        return layout
    source, made, common, labels = layout
    free = [None if label in labels else label for label in made]
    sizes = dict(zip(source, call.shape(0), strict=True)) | dict(zip(labels, common, strict=True))
    given = aligned(call.shape(2), [sizes[label] for label in made], free)
    return Labels({(0,): source, (2,): given}, [source], reason=ANYWHERE)


def _indexed(call: LabelledCall) -> tuple[list[str | None], list[str | None], tuple[int, ...], list[str | None]] | str:
    """Return labels of the source and the result of `a[i, :, j]`, the broadcast shape of the indices, and its labels.

    Dimensions of the indices replace the indexed dimensions if these are adjacent, else they come first.
    """
    found: dict[int, Value] = {path[1]: value for path, value in call.tensors.items() if path[0] == 1}
    common = broadcast([value.shape for value in found.values()])
    if common is None or any(value.dtype in ("bool", "uint8") for value in found.values()):
        return "a mask selects a number of elements that only its contents tell"
    dims = sorted(found)
    if not dims or len(dims) > len(call.shape(0)):
        return ANYWHERE
    labels = numbered(common, prefix="i")
    source = numbered(call.shape(0), dims)
    neighbours = dims == list(range(dims[0], dims[-1] + 1))
    before = [label for place, label in enumerate(source) if place not in found and neighbours and place < dims[0]]
    after = [label for place, label in enumerate(source) if place not in found and not (neighbours and place < dims[0])]
    return source, [*before, *labels, *after], common, labels


# -- concatenation and padding ----------------------------------------------------------------------------------------


def cat(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `cat` but the concatenated one; torch ignores empty 1-d tensors."""
    rank = len(call.shape_of_output())
    labels = numbered(call.shape_of_output(), (call.integer(1, "dim"),))
    return Labels({path: labels for path, value in call.tensors.items() if len(value.shape) == rank}, [labels])


def stack(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `stack` but the new one."""
    made = call.shape_of_output()
    dim = wrapped(call.integer(1, "dim"), len(made))
    labels = numbered(made, (dim,))
    return Labels(dict.fromkeys(call.tensors, _but(dim, labels, len(made) - 1)), [labels])


def pad(call: LabelledCall) -> Labels | str:
    """Label dimensions without padding of `constant_pad_nd`; amounts come in pairs, the last dimension's first."""
    shape, amounts = call.shape(0), call.integers(1, "pad")
    padded = [-1 - place // 2 for place, amount in enumerate(amounts) if amount]
    labels = numbered(shape, padded)
    return Labels({(0,): labels}, [labels], reason="edges are not the same for all parts")


# -- slices ----------------------------------------------------------------------------------------------------------


def backward(call: LabelledCall) -> Labels | str:
    """Label all dimensions but the sliced one in `slice_backward` and `select_backward`, whose sizes are literals."""
    made = call.shape_of_output()
    dim = wrapped(call.integer(2, "dim"), len(made))
    labels = numbered(made, () if call.shape(0) == made else (dim,))
    literals: dict[Path, str] = {(1, place): f"d{place}" for place in range(len(made))}
    return Labels({(0,): _but(dim, labels, len(call.shape(0)))}, [labels], literals)


def replaced(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `slice_scatter` and `select_scatter` but the sliced one."""
    dim = wrapped(call.integer(2, "dim"), len(call.shape(0)))
    labels = numbered(call.shape(0), (dim,))
    return Labels({(0,): labels, (1,): _but(dim, labels, len(call.shape(1)))}, [labels])


def _but(dim: int, labels: Dims, rank: int) -> Dims:
    """Return the labels of a tensor of this rank, which may lack one dimension."""
    return labels if rank == len(labels) else [label for place, label in enumerate(labels) if place != dim]
