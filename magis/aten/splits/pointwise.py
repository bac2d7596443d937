"""Element-wise operators, in-place forms included, and operators that make tensors from sizes alone.

    add(a, b):  a: (..., x), b: (..., x or 1) -> (..., x)
    full([x, y], number) -> (x, y), the sizes are literals

Every dimension can be cut, except in an input that is broadcast along it: that one is taken whole.
"""

from __future__ import annotations

from magis.aten.splits.labels import Call, Labels, Rule, aligned, broadcast, numbered, rows

__all__ = ["RULES", "pointwise"]


def pointwise(call: Call) -> Labels | str:
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


def factory(call: Call) -> Labels | str:
    """A tensor of one number: its sizes are the first argument's literals."""
    return _sized(call, 0)


def new(call: Call) -> Labels | str:
    """`tensor.new_zeros(sizes)`: the tensor gives type and device alone."""
    return _sized(call, 1)


def strided(call: Call) -> Labels | str:
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


def _sized(call: Call, position: int) -> Labels | str:
    sizes = call.shape_of_output()
    (where,) = call.at(position, "size")
    if len(call.integers(position, "size")) != len(sizes):
        return "sizes are no literals"
    labels = numbered(sizes)
    return Labels({}, [labels], {(where, index): label for index, label in enumerate(labels) if label is not None})


RULES: dict[str, Rule] = {
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
