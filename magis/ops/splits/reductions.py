"""Element-wise operators, reductions, and operators that work along one dimension.

sum(a, [1]):      (x, y) -> (x); y combines by "sum"
softmax(a, -1):   (x, y) -> (x, y), y not
"""

from __future__ import annotations

from magis.ops.splits.labels import LabelledCall, Labels, Rule, aligned, broadcast, numbered, rows, wrapped

# Element-wise operators, in-place forms included, and operators that make tensors from sizes alone.
#
#     add(a, b):  a: (..., x), b: (..., x or 1) -> (..., x)
#     full([x, y], number) -> (x, y), the sizes are literals
#
# Every dimension can be cut, except in an input that is broadcast along it: that one is taken whole.


def pointwise(call: LabelledCall) -> Labels | str:
    """Every dimension of the result; an input of size 1 there is broadcast."""
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
    """A tensor of one number: its sizes are the first argument's literals."""
    return _sized(call, 0)


def new(call: LabelledCall) -> Labels | str:
    """`tensor.new_zeros(sizes)`: the tensor gives type and device alone."""
    return _sized(call, 1)


def strided(call: LabelledCall) -> Labels | str:
    """Sizes and strides are literals: only the outermost dimension can shrink without changing a stride."""
    position = 1 if call.name.startswith("new_") else 0
    sizes, steps = call.integers(position), call.integers(position + 1)
    labels = _sized(call, position)
    if isinstance(labels, str) or len(sizes) != len(steps) or not sizes:
        return "strides are literals"
    real = [index for index, size in enumerate(sizes) if size > 1]
    outer = max(real, key=lambda index: steps[index], default=0)
    if any(steps[index] * sizes[index] > steps[outer] for index in real if index != outer):
        return "strides are literals"
    dims = [label if index == outer else None for index, label in enumerate(labels.outputs[0])]
    return Labels({}, [dims], labels.literals)


def _sized(call: LabelledCall, position: int) -> Labels | str:
    sizes = call.shape_of_output()
    (where,) = call.at(position, "size")
    if len(call.integers(position, "size")) != len(sizes):
        return "sizes are no literals"
    labels = numbered(sizes)
    return Labels({}, [labels], {(where, index): label for index, label in enumerate(labels) if label is not None})


POINTWISE: dict[str, Rule] = {
    # arithmetic and comparisons
    **rows(pointwise, "add sub rsub mul div neg abs sign pow sqrt rsqrt reciprocal exp exp2 expm1 log log2"),
    **rows(pointwise, "log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh erf erfc erfinv lgamma digamma"),
    **rows(pointwise, "floor ceil round trunc frac fmod remainder floor_divide maximum minimum fmax fmin clamp"),
    **rows(pointwise, "clamp_min clamp_max eq ne lt le gt ge isnan isinf isfinite signbit logical_and logical_or"),
    **rows(pointwise, "logical_not logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not nan_to_num where"),
    **rows(pointwise, "masked_fill lerp addcmul addcdiv hypot copysign heaviside xlogy logaddexp logaddexp2 sgn"),
    **rows(pointwise, "real _conj _neg_view conj_physical angle polar complex deg2rad rad2deg"),
    # activations and their backward
    **rows(pointwise, "relu threshold gelu silu mish sigmoid hardtanh hardswish hardsigmoid leaky_relu elu"),
    **rows(pointwise, "softplus softshrink hardshrink logit log_sigmoid_forward celu _prelu_kernel"),
    **rows(pointwise, "threshold_backward gelu_backward silu_backward mish_backward sigmoid_backward"),
    **rows(pointwise, "tanh_backward hardtanh_backward hardswish_backward hardsigmoid_backward"),
    **rows(pointwise, "leaky_relu_backward elu_backward softplus_backward softshrink_backward"),
    **rows(pointwise, "hardshrink_backward logit_backward log_sigmoid_backward _prelu_kernel_backward"),
    **rows(pointwise, "rrelu_with_noise_backward native_dropout_backward _masked_scale"),
    # copies and windows of the same shape
    **rows(pointwise, "clone copy _to_copy detach alias lift lift_fresh lift_fresh_copy fill zero"),
    **rows(pointwise, "detach_copy alias_copy"),
    # tensors made from another's shape, or from sizes
    **rows(pointwise, "zeros_like ones_like full_like empty_like"),
    **rows(factory, "full zeros ones empty empty_permuted"),
    **rows(new, "new_zeros new_ones new_full new_empty"),
    **rows(strided, "empty_strided new_empty_strided"),
}


_COMBINES = {
    "sum": "sum", "nansum": "sum", "count_nonzero": "sum", "mean": "mean", "amax": "max", "amin": "min",
    "any": "max", "all": "min",
}  # fmt: skip
"""How the results for parts of a reduced dimension become the whole's; the mean of equal parts' means is the mean."""


def reduction(call: LabelledCall) -> Labels | str:
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


def _combination(call: LabelledCall) -> str | None:
    if call.name in ("max", "min"):
        return call.name if call.overload == "default" else None
    if call.name == "linalg_vector_norm":
        orders = {1: "sum", float("inf"): "max", float("-inf"): "min"}
        order = call.arg(1, "ord", 2)
        return orders.get(order) if isinstance(order, int | float) else None
    return _COMBINES.get(call.name)


def _reduced(call: LabelledCall) -> set[int] | None:
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


def _names_dims(call: LabelledCall) -> bool:
    """Whether the call may name dimensions; `var(x, True)` has a flag in their place."""
    return not isinstance(call.arg(_dim_position(call), "dim"), bool)


def _dim_position(call: LabelledCall) -> int:
    """After the order of a norm, and after the k of a k-th value."""
    return 2 if call.name in ("linalg_vector_norm", "norm", "kthvalue") else 1


def elementwise_along(position: int, keyword: str = "dim", default: int = -1) -> Rule:
    """A rule for inputs and outputs of one shape that are worked on along the dimension at `position`."""

    def rule(call: LabelledCall) -> Labels | str:
        labels = numbered(call.shape(0), (call.integer(position, keyword, default),))
        inputs = {path: labels for path, value in call.tensors.items() if len(value.shape) == len(labels)}
        return Labels(inputs, [labels] * len(call.outputs), reason="every result depends on the whole dimension")

    return rule


def extremum(call: LabelledCall) -> Labels | str:
    """`max` and `min`: of two tensors, of everything, or along a dimension together with where they are."""
    if call.overload == "other":
        return pointwise(call)
    return reduction(call)


def flipped(call: LabelledCall) -> Labels | str:
    """Elements change places along the named dimensions, all of them where a `roll` names none."""
    dims = call.integers(1 if call.name == "flip" else 2, "dims")
    if call.name == "roll" and not dims:
        return "elements move across all dimensions"
    labels = numbered(call.shape(0), dims)
    return Labels({(0,): labels}, [labels], reason="elements move along the dimension")


def transform(call: LabelledCall) -> Labels | str:
    """A Fourier transform: all but the transformed dimensions, one of which may change its size."""
    labels = numbered(call.shape(0), call.integers(1, "dim"))
    return Labels({(0,): labels}, [labels], reason="every result depends on the whole dimension")


def triangle(call: LabelledCall) -> Labels | str:
    """A triangle of every matrix: which elements belong to it depends on where they are."""
    labels = numbered(call.shape(0), (-1, -2))
    return Labels({(0,): labels}, [labels], reason="the triangle is fixed by positions")


def halves(call: LabelledCall) -> Labels | str:
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
