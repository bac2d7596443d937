"""Table of ATen operators, one row per family with all facts that magis needs, read through `op_info`.

Targets are strings such as ``"aten.mm.default"``; rows are keyed by the name without namespace, overload and the
trailing underscore of in-place variants. This module does not import torch, so that graphs can be rewritten and
simulated without it. Sources: the operators' schemas (``native_functions.yaml``), and their kernels. An operator
without a row is priced by the bytes of its inputs and outputs, and never split.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from magis.ops.op_info import AttentionKernel, OpInfo

RANDOM = "random numbers would change"
MEMORY = "addresses memory, not dimensions"


def _rows(names: str, kind: str = "unknown", per_element: int = 0, split: str = "", **facts: Any) -> dict[str, OpInfo]:
    return dict.fromkeys(names.split(), OpInfo(kind, per_element, split, **facts))


def _math(names: str, kind: str = "unknown", per_element: int = 0, **facts: Any) -> dict[str, OpInfo]:
    return _rows(names, kind, per_element, "reductions.pointwise", elementwise=True, **facts)


def _product(name: str, labels: str, **facts: Any) -> dict[str, OpInfo]:
    return _rows(name, "matmul", 0, "products.product", product=tuple(labels.split(" ")), **facts)


def _attention(name: str, kernel: AttentionKernel, *, any_layout: bool = True) -> dict[str, OpInfo]:
    kind = "attention_backward" if name.endswith("_backward") else "attention"
    facts = {"attention": kernel, "any_layout": any_layout}
    return _rows(f"_scaled_dot_product_{name}", kind, 0, f"products.{kind}", **facts)


def _view(names: str, split: str = "", **facts: Any) -> dict[str, OpInfo]:
    return _rows(names, split=split, view=True, **facts)


_DENSE = {"one_dtype": True, "any_layout": True}
_SAME = {"default": "default"}
_NUMBERS = {"Tensor": "Tensor", "Scalar": "Scalar"}
_ROUNDED = {"Tensor": "Tensor", "Scalar": "Tensor"}  # `mul_.Scalar` rounds the number to the tensor's type first
_LOSS_BACK = "norms.elementwise_backward"
_NORM_BACK = "norms.batch_norm_backward"
_REDUCED = "reductions.reduction"
_PLANES = "convolution.pad"
_BAGS = "bags of an embedding have lengths of their own"
_LISTS = "updates many tensors at once"
_LAST_FIRST = "last operand first"
_PLACES = "numbers depend on where they stand"

OPERATORS: dict[str, OpInfo] = {
    # matrix products, convolutions, attention: exact counts by shape
    **_product("mm", "mk kn mn", **_DENSE),
    **_product("bmm", "bmk bkn bmn", **_DENSE),
    **_product("mv", "mk k m", one_dtype=True),
    **_product("dot", "k k ", one_dtype=True),
    **_product("vdot", "k k "),
    **_product("ger", "m n mn"),
    **_product("addmm", "mk kn mn", adds=True, **_DENSE),
    **_product("_addmm_activation", "mk kn mn", adds=True),
    **_product("baddbmm", "bmk bkn bmn", adds=True, **_DENSE),
    **_product("addbmm", "bmk bkn mn", adds=True),
    **_product("addmv", "mk k m", adds=True, one_dtype=True),
    **_product("addr", "m n mn", adds=True),
    **_rows("linear", "matmul", 0, "products.linear"),
    **_rows("mkldnn_linear", "matmul"),
    **_rows("convolution", "conv", 0, "convolution.convolution", **_DENSE),
    **_rows("_convolution cudnn_convolution cudnn_convolution_transpose", "conv"),
    **_rows("mkldnn_convolution conv1d conv2d conv3d", "conv"),
    **_rows("convolution_backward", "conv_backward", 0, "convolution.convolution_backward", **_DENSE, wide_sums=True),
    **_attention("flash_attention_for_cpu", AttentionKernel(3, 4, queries=True)),
    **_attention("flash_attention", AttentionKernel(3, 4, queries=True)),
    **_attention("efficient_attention", AttentionKernel(5, 6, mask=3, queries=True)),
    **_attention("cudnn_attention", AttentionKernel(5, 6, mask=3, queries=True), any_layout=False),
    **_attention("flash_attention_for_cpu_backward", AttentionKernel(6, 7, saved=(4, 5), queries=True)),
    **_attention("flash_attention_backward", AttentionKernel(10, 11, saved=(4, 5), lengths=(6, 7))),
    **_attention("efficient_attention_backward", AttentionKernel(9, 11, mask=4, saved=(5, 6))),
    **_attention(
        "cudnn_attention_backward", AttentionKernel(13, 14, mask=8, saved=(4, 5), lengths=(9, 10)), any_layout=False
    ),
    **_rows("_scaled_dot_product_fused_attention_overrideable", "attention"),
    **_rows("_scaled_dot_product_fused_attention_overrideable_backward", "attention_backward"),
    # one result per element, little arithmetic
    **_math("add", "pointwise", 1, in_place=_NUMBERS, commutative=True, exact_for_complex=("Tensor",)),
    **_math("sub", "pointwise", 1, in_place={"Tensor": "Tensor"}, exact_for_complex=("Tensor",)),
    **_math("mul", "pointwise", 1, in_place=_ROUNDED, commutative=True, exact_for_complex=("Tensor", "Scalar")),
    **_math("neg", "pointwise", 1, in_place=_SAME, exact_for_complex=("default",)),
    **_rows(
        "masked_fill", "pointwise", 1, "reductions.pointwise", in_place=_NUMBERS, exact_for_complex=("Scalar",)
    ),
    **_math("relu clamp hardtanh leaky_relu", "pointwise", 1, in_place=_SAME),
    **_math("threshold_backward leaky_relu_backward", "pointwise", 1, out="grad_input", layout=_LAST_FIRST),
    **_math("hardtanh_backward", "pointwise", 1, out="grad_input"),
    **_math("rsub", "pointwise", 1, layout=_LAST_FIRST),
    **_math("abs maximum minimum sign clamp_min clamp_max eq ne lt le gt ge", "pointwise", 1),
    **_math("where", "pointwise", 1, scratch="shapes", layout="fake"),
    **_math("logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not bitwise_xor", "pointwise", 1),
    **_math("isnan isinf isfinite floor ceil round trunc threshold fmod remainder", "pointwise", 1),
    **_math("native_dropout_backward", "pointwise", 1, scratch="shapes"),
    **_math("addcmul lerp", "pointwise", 2),
    **_math("div", "pointwise", 4, in_place=_NUMBERS),
    **_math("sqrt hardswish", "pointwise", 4, in_place=_SAME),
    **_math("hardswish_backward", "pointwise", 4, out="out"),
    **_math("hardsigmoid_backward", "pointwise", 4),
    **_math("sigmoid_backward tanh_backward", "pointwise", 4, out="grad_input"),
    **_math("addcdiv rsqrt reciprocal hardsigmoid floor_divide _masked_scale _prelu_kernel", "pointwise", 4),
    **_rows("square relu6", "pointwise", 1),
    **_rows("prelu l1_loss", "pointwise", 4),
    **_rows("_fused_adam _fused_adamw _fused_sgd _fused_adagrad", "pointwise", 12, never_split=_LISTS, scaled=1),
    **_rows("_foreach_add _foreach_mul _foreach_sub _foreach_div", "pointwise", 4, never_split=_LISTS),
    **_rows("_foreach_addcmul _foreach_addcdiv _foreach_lerp", "pointwise", 4, never_split=_LISTS),
    **_rows("_foreach_sqrt _foreach_neg _foreach_copy", "pointwise", 4, never_split=_LISTS),
    **_rows("_foreach_pow _foreach_reciprocal _foreach_maximum", never_split=_LISTS),
    # one result per element, a polynomial each
    **_math("exp elu", "transcendental", 12, in_place=_SAME),
    **_math("elu_backward", "transcendental", 12, out="grad_input"),
    **_math("exp2 expm1 log log2 log10 log1p sin cos", "transcendental", 12),
    **_math("sigmoid silu", "transcendental", 16, in_place=_SAME),
    **_math("softplus_backward", "transcendental", 16),
    **_math("log_sigmoid_forward", "transcendental", 16, layout="all rows"),
    **_math("softplus logit", "transcendental", 16),
    **_math("tanh gelu", "transcendental", 24, in_place=_SAME),
    **_math("pow", "transcendental", 24, in_place={"Tensor_Scalar": "Scalar"}),
    **_math("silu_backward", "transcendental", 24, out="grad_input"),
    **_math("erf erfc erfinv atan atan2 asin acos tan sinh cosh mish log_sigmoid_backward", "transcendental", 24),
    **_math("gelu_backward", "transcendental", 40, out="grad_input"),
    **_math("mish_backward", "transcendental", 40),
    **_math("rrelu_with_noise_backward", layout="rows"),
    **_math("lgamma digamma frac fmax fmin signbit logical_xor nan_to_num hypot copysign heaviside xlogy sgn"),
    **_math("logaddexp logaddexp2 conj_physical deg2rad rad2deg celu softshrink softshrink_backward hardshrink"),
    **_math("hardshrink_backward logit_backward"),
    **_math("_prelu_kernel_backward", layout="fake"),
    **_rows("polar complex angle", split="reductions.pointwise"),
    # losses
    **_rows("mse_loss smooth_l1_loss", "pointwise", 2, "norms.elementwise", reduction=2, input_size=True),
    **_rows("huber_loss", "pointwise", 4, "norms.elementwise", reduction=2),
    **_rows("soft_margin_loss", split="norms.elementwise", reduction=2, input_size=True),
    **_rows("binary_cross_entropy", "transcendental", 24, "norms.elementwise", reduction=3, input_size=True),
    **_rows("binary_cross_entropy_with_logits", "transcendental", 24, "norms.elementwise", reduction=4),
    **_rows("mse_loss_backward smooth_l1_loss_backward", "pointwise", 2, _LOSS_BACK, reduction=3, layout="rows"),
    **_rows("huber_loss_backward", "pointwise", 4, _LOSS_BACK, reduction=3, layout="rows"),
    **_rows("soft_margin_loss_backward", split=_LOSS_BACK, reduction=3),
    **_rows("binary_cross_entropy_backward", "transcendental", 24, _LOSS_BACK, reduction=4),
    **_rows("nll_loss_forward nll_loss2d_forward", "gather", 0, "norms.nll"),
    **_rows("nll_loss_backward nll_loss2d_backward", "fill", 0, "norms.nll_backward"),
    # dimensions that are summed or worked along
    **_rows("sum", "reduction", 1, _REDUCED, combines="sum", any_layout=True, scratch="shapes"),
    **_rows("mean", "reduction", 1, _REDUCED, combines="mean", any_layout=True),
    **_rows("nansum count_nonzero", "reduction", 1, _REDUCED, combines="sum"),
    **_rows("amax any", "reduction", 1, _REDUCED, combines="max", scratch="shapes"),
    **_rows("amin all", "reduction", 1, _REDUCED, combines="min", scratch="shapes"),
    **_rows("argmax argmin", "reduction", 1, _REDUCED, scratch="shapes"),
    **_rows("prod", "reduction", 1, _REDUCED, scratch="values"),
    **_rows("max", "reduction", 1, "reductions.extremum", combines="max"),
    **_rows("min", "reduction", 1, "reductions.extremum", combines="min"),
    **_rows("var std var_mean std_mean aminmax", "reduction", 3, _REDUCED),
    **_rows("norm linalg_vector_norm", "reduction", 3, _REDUCED, dim=2),
    **_rows("logsumexp", "reduction", 14, _REDUCED),
    **_rows("median mode nanmedian", split=_REDUCED),
    **_rows("kthvalue", split=_REDUCED, dim=2),
    **_rows("_foreach_norm", "reduction", 3, never_split=_LISTS),
    **_rows("trace", "reduction", 3),
    **_rows("cumsum", "reduction", 3, "reductions.along", scratch="shapes"),
    **_rows("cumprod", "reduction", 3, "reductions.along", scratch="values"),
    **_rows("logcumsumexp sort", "reduction", 3, "reductions.along"),
    **_rows("topk", "reduction", 3, "reductions.along", dim=2),
    **_rows("cummax cummin", split="reductions.along"),
    **_rows("_softmax _log_softmax", "softmax", 14, "reductions.along", dim=1, out="out"),
    **_rows("_safe_softmax", "softmax", 14, "reductions.along"),
    **_rows("_masked_softmax", "softmax", 14),
    **_rows("_softmax_backward_data", "softmax", 4, "reductions.along", dim=2, out="out", keyword="grad_input"),
    **_rows(
        "_log_softmax_backward_data", "softmax", 4, "reductions.along", dim=2, layout="rows", out="out"
    ),
    **_rows("_fft_r2c _fft_c2r _fft_c2c", split="reductions.along"),
    **_rows("glu", split="reductions.along"),
    **_rows("glu_backward", split="reductions.along", dim=2, layout="rows"),
    # norms
    **_rows("native_layer_norm", "norm", 6, "norms.layer_norm", parameters=(2, 3)),
    **_rows("_fused_rms_norm", "norm", 6, "norms.layer_norm"),
    **_rows("rms_norm", "norm", 6),
    **_rows("native_layer_norm_backward", "norm", 10, "norms.layer_norm_backward", layout="rows", wide_sums=True),
    **_rows("_fused_rms_norm_backward", "norm", 10, "norms.layer_norm_backward"),
    **_rows("native_group_norm", "norm", 6, "norms.group_norm", parameters=(1, 2)),
    **_rows("native_group_norm_backward", "norm", 10, "norms.group_norm_backward", wide_sums=True),
    **_rows(
        "native_batch_norm", "batch_norm", 6, "norms.batch_norm", training=5, undeclared=(3, 4), layout="rows",
        parameters=(1, 2, 3, 4), any_layout=True,
    ),
    **_rows("cudnn_batch_norm miopen_batch_norm", "batch_norm", 6, "norms.batch_norm", training=5, undeclared=(3, 4)),
    **_rows("_native_batch_norm_legit", "batch_norm", 6, "norms.batch_norm", training=5),
    **_rows("_native_batch_norm_legit_functional", split="norms.batch_norm", training=5),
    **_rows("_native_batch_norm_legit_no_training _batch_norm_no_update", "batch_norm", 6, "norms.batch_norm"),
    **_rows("_batch_norm_with_update", "batch_norm", 6, "norms.batch_norm"),
    **_rows("_batch_norm_with_update_functional", split="norms.batch_norm"),
    **_rows("batch_norm_elemt", "batch_norm", 6),
    **_rows(
        "native_batch_norm_backward", "batch_norm", 10, _NORM_BACK, training=7, layout="second", any_layout=True,
        wide_sums=True,
    ),
    **_rows("batch_norm_backward", "batch_norm", 10, _NORM_BACK, training=7),
    **_rows("cudnn_batch_norm_backward", "batch_norm", 10, _NORM_BACK),
    **_rows("miopen_batch_norm_backward", split=_NORM_BACK),
    **_rows("_weight_norm_interface", split="norms.weight_norm", dim=2),
    **_rows("_weight_norm_interface_backward", split="norms.weight_norm", dim=4),
    # windows
    **_rows("max_pool2d_with_indices max_pool2d_with_indices_backward", "pool", 1, "convolution.max_pool"),
    **_rows("adaptive_max_pool2d adaptive_max_pool2d_backward", "pool", 1, "convolution.max_pool"),
    **_rows("max_pool3d_with_indices", "pool", 1, "convolution.max_pool"),
    **_rows("max_pool3d_with_indices_backward", split="convolution.max_pool", scratch="shapes"),
    **_rows("adaptive_max_pool3d adaptive_max_pool3d_backward", split="convolution.max_pool", scratch="shapes"),
    **_rows("avg_pool1d avg_pool2d avg_pool3d", "pool", 1, "convolution.average_pool"),
    **_rows("avg_pool2d_backward avg_pool3d_backward", "pool", 1, "convolution.average_pool"),
    **_rows("_adaptive_avg_pool2d _adaptive_avg_pool2d_backward", "pool", 1, "convolution.adaptive_pool"),
    **_rows("adaptive_avg_pool1d _adaptive_avg_pool3d", split="convolution.adaptive_pool"),
    **_rows("_adaptive_avg_pool3d_backward", split="convolution.adaptive_pool"),
    **_rows("max_pool2d max_pool3d adaptive_avg_pool2d", "pool", 1),
    **_rows("upsample_nearest1d upsample_nearest2d upsample_nearest3d", "resize", 2, "convolution.resize"),
    **_rows("upsample_nearest2d_backward _upsample_nearest_exact2d", "resize", 2, "convolution.resize"),
    **_rows("_upsample_nearest_exact2d_backward", "resize", 2, "convolution.resize"),
    **_rows("upsample_bilinear2d _upsample_bilinear2d_aa", "resize", 8, "convolution.resize"),
    **_rows("upsample_bilinear2d_backward", "resize", 8, "convolution.resize"),
    **_rows("upsample_bicubic2d upsample_bicubic2d_backward", "resize", 32, "convolution.resize"),
    **_rows("upsample_nearest1d_backward upsample_nearest3d_backward", split="convolution.resize"),
    **_rows("_upsample_nearest_exact1d _upsample_nearest_exact1d_backward", split="convolution.resize"),
    **_rows("_upsample_nearest_exact3d _upsample_nearest_exact3d_backward", split="convolution.resize"),
    **_rows("upsample_linear1d upsample_linear1d_backward upsample_trilinear3d", split="convolution.resize"),
    **_rows("upsample_trilinear3d_backward _upsample_bicubic2d_aa", split="convolution.resize"),
    **_rows("_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward", split="convolution.resize"),
    # moved, not computed
    **_rows("clone _to_copy", "copy", 0, "reductions.pointwise", any_layout=True),
    **_rows("copy", "copy", 0, "reductions.pointwise", overwrites=True),
    **_rows("lift_fresh_copy detach_copy alias_copy", "copy", 0, "reductions.pointwise"),
    **_rows("cat", "copy", 0, "indexing.cat", any_layout=True),
    **_rows("stack", "copy", 0, "indexing.stack"),
    **_rows("constant_pad_nd", "copy", 0, "indexing.pad"),
    **_rows("reflection_pad2d reflection_pad2d_backward replication_pad2d", "copy", 0, _PLANES),
    **_rows("reflection_pad1d reflection_pad1d_backward reflection_pad3d reflection_pad3d_backward", split=_PLANES),
    **_rows("replication_pad1d replication_pad1d_backward replication_pad2d_backward", split=_PLANES),
    **_rows("replication_pad3d replication_pad3d_backward", split=_PLANES),
    **_rows("slice_backward select_backward", "copy", 0, "indexing.backward"),
    **_rows("slice_scatter select_scatter", "copy", 0, "indexing.replaced"),
    **_rows("flip", "copy", 0, "reductions.flipped"),
    **_rows("roll", "copy", 0, "reductions.flipped", dim=2),
    **_rows("tril triu", "copy", 0, "reductions.triangle"),
    **_rows("pixel_shuffle pixel_unshuffle", "copy", 0, "convolution.shuffle"),
    **_rows("im2col col2im", "copy", 0, "convolution.columns", input_size=True),
    **_rows("repeat", "copy", 0, "views.repeat"),
    **_rows("view_copy _reshape_copy", "copy", 0, "views.view"),
    **_rows("permute_copy", "copy", 0, "views.permute"),
    **_rows("expand_copy", "copy", 0, "views.expand"),
    **_rows("masked_select nonzero", "copy", never_split="how many elements there are depends on the contents"),
    **_rows("_unique2", never_split="how many elements there are depends on the contents"),
    **_rows("contiguous as_strided_scatter diagonal_backward diagonal_scatter repeat_interleave", "copy"),
    **_rows("unfold_backward channel_shuffle native_channel_shuffle resize split_copy split_with_sizes_copy", "copy"),
    **_rows("narrow_copy diagonal_copy as_strided_copy unfold_copy unbind_copy", "copy"),
    # chosen by indices
    **_rows("embedding", "gather", 0, "indexing.embedding"),
    **_rows("gather", "gather", 0, "indexing.gather"),
    **_rows("index_select", "gather", 0, "indexing.index_select"),
    **_rows("index _unsafe_index", "gather", 0, "indexing.index"),
    **_rows("take", "gather", scratch="values"),
    **_rows("put", scratch="values"),
    **_rows("grid_sampler_2d bucketize", "gather"),
    **_rows("_embedding_bag", "gather", one_more=1, never_split=_BAGS, scratch="numbers"),
    **_rows("_embedding_bag_forward_only", one_more=1, never_split=_BAGS),
    **_rows("embedding_dense_backward", "scatter", 1, "indexing.embedding_backward", scratch="shapes", wide_sums=True),
    **_rows("scatter", "scatter", 1, "indexing.scatter", scratch="shapes"),
    **_rows("scatter_add", "scatter", 1, "indexing.scatter", scratch="shapes", in_place=_SAME),
    **_rows("scatter_reduce", "scatter", 1, "indexing.scatter"),
    **_rows("index_put _index_put_impl _unsafe_index_put", "scatter", 1, "indexing.index_put"),
    **_rows("index_add index_copy index_fill", "scatter", 1, "indexing.index_along"),
    **_rows("index_reduce", split="indexing.index_along"),
    **_rows("masked_scatter", "scatter", 1),
    # made from nothing
    **_rows("zeros ones full", "fill", 0, "reductions.factory"),
    **_rows("new_zeros new_ones new_full", "fill", 0, "reductions.factory"),
    **_rows("zeros_like ones_like full_like", "fill", 0, "reductions.pointwise"),
    **_rows("fill zero", "fill", 0, "reductions.pointwise", overwrites=True),
    **_rows("arange eye linspace tril_indices triu_indices", "fill", never_split=_PLACES),
    **_rows("range logspace", never_split=_PLACES),
    **_rows("scalar_tensor", "fill", never_split="one number"),
    **_rows("one_hot", "fill"),
    **_rows("rand rand_like randint randint_like", "random", 8, never_split=RANDOM, free_draws=True),
    **_rows("randperm native_dropout", "random", 8, never_split=RANDOM, free_draws=True),
    **_rows("bernoulli uniform exponential", "random", 8, never_split=RANDOM, free_draws=True, overwrites=True),
    **_rows("random geometric", "random", 8, free_draws=True, overwrites=True),
    **_rows("_fused_dropout multinomial", "random", 8, never_split=RANDOM),
    **_rows("rrelu_with_noise", "random", 8, never_split=RANDOM, layout="rows"),
    **_rows("randn randn_like", "random", 30, never_split=RANDOM, free_draws=True),
    **_rows("normal", "random", 30, never_split=RANDOM, free_draws=True, overwrites=True),
    **_rows("log_normal cauchy", "random", 30, free_draws=True, overwrites=True),
    **_rows("poisson", "random", 30),
    # nothing to do
    **_rows("empty empty_permuted new_empty", "none", 0, "reductions.factory"),
    **_rows("empty_strided new_empty_strided", "none", 0, "reductions.strided"),
    **_rows("empty_like lift", "none", 0, "reductions.pointwise"),
    **_rows("_local_scalar_dense is_same_size", "none", never_split="one number"),
    **_rows("set", "none", never_split=MEMORY),
    **_rows("sym_size resize_as", "none"),
    # views
    **_view("real _conj _neg_view alias lift_fresh", "reductions.pointwise"),
    **_view("detach", "reductions.pointwise", in_place=_SAME),
    **_view("view _unsafe_view reshape", "views.view"),
    **_view("flatten", "views.flatten"),
    **_view("expand", "views.expand"),
    **_view("permute", "views.permute"),
    **_view("t", "views.transpose", in_place=_SAME),
    **_view("transpose", "views.transpose", in_place={"int": "default"}),
    **_view("numpy_T swapaxes", "views.transpose"),
    **_view("movedim", "views.movedim"),
    **_view("unsqueeze", "views.unsqueeze", in_place=_SAME),
    **_view("squeeze", "views.squeeze", in_place={**_SAME, "dim": "dim", "dims": "dims"}),
    **_view("select unbind", "views.select"),
    **_view("slice narrow", "views.window"),
    **_view("split split_with_sizes chunk", "views.window", dim=2),
    **_view("as_strided", "views.as_strided", in_place=_SAME),
    **_view("_reshape_alias", never_split=MEMORY),
    **_view("diagonal", "views.diagonal"),
    **_view("unfold", "views.unfold"),
    **_view("view_as_real view_as_complex", "views.complex_pairs"),
    **_rows("t_copy transpose_copy", "copy", 0, "views.transpose"),
    **_rows("unsqueeze_copy", "copy", 0, "views.unsqueeze"),
    **_rows("squeeze_copy", "copy", 0, "views.squeeze"),
    **_rows("select_copy", "copy", 0, "views.select"),
    **_rows("slice_copy", "copy", 0, "views.window"),
    **_view("unsafe_split unsafe_split_with_sizes", "views.window", dim=2),
}  # fmt: skip
"""Operator name -> facts."""

_NOTHING = OpInfo()


def name_of(target: str) -> str:
    """Return the operator's key in OPERATORS: "add" for "aten.add_.Tensor", "_softmax" for "aten._softmax.default"."""
    return target.partition(".")[2].partition(".")[0].removesuffix("_")


_FLEX = {
    "magis_flex.flex_attention.default": OpInfo("attention"),
    "magis_flex.flex_attention_backward.default": OpInfo("attention_backward"),
}
"""Operators of `magis.capture.flex_kernels`."""


@cache
def op_info(target: str) -> OpInfo:
    """Return the facts about an operator. In-place variants are never views and choose no layout."""
    if not target.startswith("aten."):
        return _FLEX.get(target, _NOTHING)
    found = OPERATORS.get(name_of(target), _NOTHING)
    fresh = not target.split(".")[1].endswith("_")
    layout = (found.layout or "operands" * found.elementwise) * fresh
    return replace(found, view=found.view and fresh, any_layout=found.any_layout and fresh, layout=layout)
