"""Split rules of convolutions, pooling, resizing and edge padding, forward and backward.

    convolution:           (n, i, y, x), (o, i, ky, kx), (o) -> (n, o, y, x); i sums without bias
    convolution_backward:  n sums in the gradients of weight and bias, o in the gradient of the input
    grouped:               (n, g, y, x), (g, -, ky, kx), (g) -> (n, g, y, x); the literal groups is divided

Spatial sizes of the larger image must be those of the smaller one times the stride. If windows do not overlap (1 x 1
kernels, patches, 2 x 2 pooling), none crosses the border of two slices. Otherwise a part takes its slice of the
larger image with a halo, zeros where the whole is padded, and does not pad:

    window 3, stride 1, padding 1     rows 4-7 of the result are made of rows 3-8 of the image
    gradient of the image             rows 4-7 of the gradient are added to rows 3-8

If the larger image is an output (the gradient of the image, the result of a transposed convolution), parts are summed
row by row; a bias, or the gradient of one, would be counted twice there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from magis.graph.nodes import Arg
from magis.ops.splits.labels import Around, Dims, LabelledCall, Labels, Path, Places, numbered

UNEVEN = "windows do not fall into equal stretches"


# -- places ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Places:
    """Labels of the spatial dimensions of the larger and the smaller image."""

    large: list[str | Around | None] = field(default_factory=list)
    small: list[str | Around | None] = field(default_factory=list)
    replaced: dict[str, tuple[Path, int]] = field(default_factory=dict)

    def add(
        self, name: str, large: int, small: int, windows: tuple[int, int, int], padding: Path, extra: int = 0
    ) -> None:
        """Append a spatial dimension with these sizes. `windows`: extent, stride and padding; `padding`: position of
        the padding literal, () if a halo is impossible; `extra`: rows behind the last window (output padding of a
        transposed convolution)."""
        span, step, margin = windows
        fits = large == small * step
        halo = fits and 0 < margin < span and padding != ()
        beside = fits and margin == 0 and span <= step
        around = Around(name, margin, max(0, span - step - margin + extra))
        self.large.append(around if halo else name if beside else None)
        self.small.append(name if halo or beside else None)
        if halo:
            self.replaced[name] = padding, 0


def _literal(call: LabelledCall, position: int, keyword: str, index: int, rank: int) -> Path:
    """Return the position of a spatial dimension's literal in a list argument; () if one number is for all."""
    (where,), found = call.at(position, keyword), call.arg(position, keyword)
    return (where, index) if isinstance(found, tuple) and len(found) == rank else ()


# -- convolution -----------------------------------------------------------------------------------------------------


def convolution(call: LabelledCall) -> Labels | str:
    """Label samples, channels and spatial dimensions of a convolution."""
    image, weight, made = call.shape(0), call.shape(1), call.shape_of_output()
    if len(image) != len(weight):
        return "not (sample, channel, place)"
    transposed, groups = call.arg(6) is True, call.integer(8, "groups", 1)
    biased = call.tensor(2) is not None
    before, after, replaced = _places(image, made, weight[2:], call, 3, halo=not (transposed and biased))
    source, target, inputs = _channels(weight, groups, transposed)
    return Labels(
        inputs={(0,): ["n", source, *before], (1,): inputs, (2,): [target]},
        outputs=[["n", target, *after]],
        literals={(8,): "g"} if groups > 1 else {},
        combine={} if biased else {"i": "sum"},
        replaced=replaced,
        reason=UNEVEN,
    )


def convolution_backward(call: LabelledCall) -> Labels | str:
    """Label the dimensions of a convolution's backward; gradients sum over labels that they lack."""
    gradient, image, weight = call.shape(0), call.shape(1), call.shape(2)
    if len(image) != len(weight):
        return "not (sample, channel, place)"
    transposed, groups = call.arg(7) is True, call.integer(9, "groups", 1)
    halo = not (transposed and call.outputs[2] is not None)
    before, after, replaced = _places(image, gradient, weight[2:], call, 4, halo=halo)
    source, target, inputs = _channels(weight, groups, transposed)
    whole: Places = ["n", source, *before]
    places = (f"s{index}" for index in range(len(before)))
    sums: dict[str, str | Sequence[str | None]] = dict.fromkeys(("n", "o", *places), "sum")
    biased = isinstance(call.arg(3), tuple) and call.integers(3) not in ((), (0,))
    literals: dict[Path, str] = {(3, 0): target} if biased else {}
    return Labels(
        inputs={(0,): ["n", target, *after], (1,): whole, (2,): inputs},
        outputs=[whole, inputs, [target]],
        literals=literals | ({(9,): "g"} if groups > 1 else {}),
        combine=sums | {"i": (None, None, "same")},
        replaced=replaced,
    )


def _channels(weight: Sequence[int], groups: int, transposed: bool) -> tuple[str, str, Dims]:
    """Return the labels of input channels, output channels, and the weight's dimensions.

    With groups, equal slices of channels are whole groups; channels within a group are not split.
    """
    rest: list[str | None] = [None] * (len(weight) - 2)
    if groups > 1:
        return "g", "g", ["g", None, *rest]
    return "i", "o", ["i", "o", *rest] if transposed else ["o", "i", *rest]


def _places(
    image: Sequence[int], made: Sequence[int], kernel: Sequence[int], call: LabelledCall, first: int, *, halo: bool
) -> tuple[Places, Places, dict[str, tuple[Path, int]]]:
    """Return labels of the spatial dimensions of input and output; `first` is the stride's argument position."""
    rank, transposed = len(kernel), call.arg(first + 3) is True
    lists = (_each(call.arg(position), rank) for position in (first, first + 1, first + 2, first + 4))
    found = _Places()
    for index, (size, step, margin, spread, extra) in enumerate(zip(kernel, *lists, strict=True)):
        sizes = image[index + 2], made[index + 2]
        small, large = sizes if transposed else sizes[::-1]
        padding = _literal(call, first + 1, "padding", index, rank) if halo else ()
        windows = (size - 1) * spread + 1, step, margin
        found.add(f"s{index}", large, small, windows, padding, extra if transposed else 0)
    before, after = (found.small, found.large) if transposed else (found.large, found.small)
    return before, after, found.replaced


def _each(arg: Arg, rank: int, default: int = 1) -> list[int]:
    """Return one number per spatial dimension; a single number is repeated."""
    items = [item for item in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(item, int)]
    return items if len(items) == rank else (items or [default])[:1] * rank


# -- pooling ---------------------------------------------------------------------------------------------------------


def _rank(call: LabelledCall) -> int:
    """Return the number of spatial dimensions from the operator's name: 2 for `avg_pool2d_backward`."""
    return int(next(word for word in call.name.split("_") if word[-2:] in ("1d", "2d", "3d"))[-2])


def max_pool(call: LabelledCall) -> Labels | str:
    """Label samples and channels of max pooling; its indices count over the whole plane, so planes are not split."""
    return _planes(call, "places count from the corner of the whole plane")


def pad(call: LabelledCall) -> Labels | str:
    """Label samples and channels of reflection and replication padding."""
    return _planes(call, "edges are not the same for all parts")


def _planes(call: LabelledCall, reason: str) -> Labels:
    rank = _rank(call)
    inputs: dict[Path, Dims] = {path: _but_places(value.shape, rank) for path, value in call.tensors.items()}
    made = [() if value is None else _but_places(value.shape, rank) for value in call.outputs]
    return Labels(inputs, made, reason=reason)


def _but_places(shape: Sequence[int], rank: int) -> Dims:
    return numbered(shape, tuple(range(-rank, 0)))


def average_pool(call: LabelledCall) -> Labels | str:
    """Label samples, channels and spatial dimensions of average pooling; halo zeros must count like padding."""
    rank = _rank(call)
    backward = call.name.endswith("_backward")
    image, pooled = (call.shape(1), call.shape(0)) if backward else (call.shape(0), call.shape_of_output())
    first = 2 if backward else 1
    spans = _each(call.arg(first, "kernel_size"), rank)
    steps = _each(call.arg(first + 1, "stride"), rank) if call.integers(first + 1, "stride") else spans
    margins = _each(call.arg(first + 2, "padding"), rank, 0)
    counted = call.arg(first + 4, "count_include_pad", True) is True or call.arg(first + 5, "divisor_override")
    halo = bool(counted) and call.arg(first + 3, "ceil_mode", False) is False
    found = _Places()
    for index in range(rank):
        padding = _literal(call, first + 2, "padding", index, rank) if halo else ()
        windows = spans[index], steps[index], margins[index]
        found.add(f"s{index}", image[index - rank], pooled[index - rank], windows, padding)
    leading = _but_places(image, rank)[: len(image) - rank]
    large, small = [*leading, *found.large], [*leading, *found.small]
    inputs: dict[Path, Places] = {(0,): small, (1,): large} if backward else {(0,): large}
    return Labels(inputs, [large if backward else small], replaced=found.replaced, reason=UNEVEN)


def adaptive_pool(call: LabelledCall) -> Labels | str:
    """Label samples, channels and evenly divided spatial dimensions of adaptive pooling; output sizes are literals."""
    rank = _rank(call)
    backward = call.name.endswith("_backward")
    image, pooled = (call.shape(1), call.shape(0)) if backward else (call.shape(0), call.shape_of_output())
    leading = len(image) - rank
    if len(image) != len(pooled):
        return "not (sample, channel, place)"
    labels = [
        label if place < leading or image[place] % max(1, pooled[place]) == 0 else None
        for place, label in enumerate(numbered(image))
    ]
    literals: dict[Path, str] = {} if backward else {(1, place): f"d{place + leading}" for place in range(rank)}
    return Labels(dict.fromkeys(call.tensors, labels), [labels], literals)


# -- resizing --------------------------------------------------------------------------------------------------------


def resize(call: LabelledCall) -> Labels | str:
    """Label samples, channels, and spatial dimensions of nearest resizing by powers of two; sizes are literals."""
    rank = _rank(call)
    literals: dict[Path, str]
    if call.name.endswith("_backward"):  # the sizes before are literals, too
        places = _repeated(call, call.shape_of_output(), call.shape(0), rank, 3)
        literals = {(2, 0): "n", (2, 1): "c"}
        for index, label in enumerate(places):
            if label is not None:
                literals |= {(1, index): label, (2, index + 2): label}
    else:
        places = _repeated(call, call.shape(0), call.shape_of_output(), rank, 2)
        literals = {(1, index): f"s{index}" for index in range(rank)}
    labels: Dims = ["n", "c", *places]
    return Labels({(0,): labels}, [labels], literals)


def _repeated(
    call: LabelledCall, small: Sequence[int], large: Sequence[int], rank: int, scales: int
) -> list[str | None]:
    """Return labels of spatial dimensions that nearest resizing scales by a power of two: exact in floating point."""
    labels: list[str | None] = []
    for index in range(rank):
        before, after = small[index + 2], large[index + 2]
        times = after // max(1, before)
        exact = times > 0 and times & (times - 1) == 0 and after == before * times
        exact = exact and call.overload == "default" and call.arg(scales + index) in (None, times)
        labels.append(f"s{index}" if "nearest" in call.name and exact else None)
    return labels


# -- channels to places ----------------------------------------------------------------------------------------------


def shuffle(call: LabelledCall) -> Labels | str:
    """Label all dimensions of `pixel_shuffle` and its inverse: (n, c r r, y, x) <-> (n, c, y r, x r)."""
    labels = numbered(call.shape(0))
    return Labels({(0,): labels}, [labels])


def columns(call: LabelledCall) -> Labels | str:
    """Label samples and channels of `im2col` and `col2im`; channels are the leading factor of the columns' rows."""
    image, rank = (call.shape(0), 3) if call.name == "im2col" else (call.shape_of_output(), 2)
    batched = len(call.shape(0)) > rank
    names: list[str | None] = ["n", "c"] if batched else ["c"]
    taken = [*names, *(None for _ in call.shape(0)[len(names) :])]
    made = [*names, *(None for _ in call.shape_of_output()[len(names) :])]
    return Labels({(0,): taken}, [made], limits={"c": image[len(names) - 1]})
