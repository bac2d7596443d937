"""Which family an ATen operator belongs to: what its time is made of.

One row per operator name (without namespace, overload and the underscore of in-place forms). The number in a
row is the arithmetic per element, in floating-point operations, as a vector unit pays for it: a polynomial of
`exp` takes about a dozen, `tanh` and `erf` about two dozen. Matrix products count exactly
(`magis.cost.flops`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """`kind` selects the device's reachable share; `per_element` is arithmetic per output element (flop)."""

    kind: str
    per_element: int = 0


def _rows(kind: str, per_element: int, names: str) -> dict[str, Family]:
    return dict.fromkeys(names.split(), Family(kind, per_element))


FAMILIES: dict[str, Family] = {
    # exact counts by shape
    **_rows("matmul", 0, "mm bmm addmm baddbmm addbmm mv addmv dot vdot linear _addmm_activation"),
    **_rows("matmul", 0, "mkldnn_linear ger addr"),
    **_rows("conv", 0, "convolution _convolution cudnn_convolution mkldnn_convolution"),
    **_rows("conv", 0, "conv2d conv1d conv3d cudnn_convolution_transpose"),
    **_rows("conv_backward", 0, "convolution_backward"),
    **_rows(
        "attention",
        0,
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
        " _scaled_dot_product_fused_attention_overrideable",
    ),
    **_rows(
        "attention_backward",
        0,
        "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward"
        " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward"
        " _scaled_dot_product_fused_attention_overrideable_backward",
    ),
    # one result per element, little arithmetic
    **_rows("pointwise", 1, "add sub rsub mul neg abs relu maximum minimum sign clamp clamp_min clamp_max"),
    **_rows("pointwise", 1, "where masked_fill eq ne lt le gt ge logical_and logical_or logical_not"),
    **_rows("pointwise", 1, "bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf isfinite floor ceil"),
    **_rows("pointwise", 1, "round trunc threshold threshold_backward hardtanh hardtanh_backward square"),
    **_rows("pointwise", 1, "leaky_relu leaky_relu_backward native_dropout_backward relu6 fmod remainder"),
    **_rows("pointwise", 2, "addcmul lerp mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward"),
    **_rows("pointwise", 4, "div addcdiv sqrt rsqrt reciprocal hardsigmoid hardsigmoid_backward hardswish"),
    **_rows("pointwise", 4, "hardswish_backward sigmoid_backward tanh_backward huber_loss prelu floor_divide"),
    **_rows("pointwise", 4, "huber_loss_backward _masked_scale l1_loss _prelu_kernel"),
    **_rows("pointwise", 12, "_fused_adam _fused_adamw _fused_sgd _fused_adagrad"),
    **_rows("pointwise", 4, "_foreach_add _foreach_mul _foreach_sub _foreach_div _foreach_addcmul"),
    **_rows("pointwise", 4, "_foreach_addcdiv _foreach_lerp _foreach_sqrt _foreach_neg _foreach_copy"),
    # one result per element, a polynomial each
    **_rows("transcendental", 12, "exp exp2 expm1 log log2 log10 log1p sin cos elu elu_backward"),
    **_rows("transcendental", 16, "sigmoid silu softplus softplus_backward log_sigmoid_forward logit"),
    **_rows("transcendental", 24, "tanh erf erfc gelu pow atan atan2 asin acos tan sinh cosh mish erfinv"),
    **_rows("transcendental", 24, "silu_backward log_sigmoid_backward binary_cross_entropy"),
    **_rows("transcendental", 24, "binary_cross_entropy_backward binary_cross_entropy_with_logits"),
    **_rows("transcendental", 40, "gelu_backward mish_backward"),
    # rows that are summed or normalized
    **_rows("reduction", 1, "sum mean amax amin max min any all prod argmax argmin count_nonzero nansum"),
    **_rows("reduction", 3, "var std var_mean std_mean norm linalg_vector_norm cumsum cumprod aminmax"),
    **_rows("reduction", 3, "logcumsumexp _foreach_norm trace sort topk"),
    **_rows("reduction", 14, "logsumexp"),
    **_rows("softmax", 14, "_softmax _log_softmax _safe_softmax _masked_softmax"),
    **_rows("softmax", 4, "_softmax_backward_data _log_softmax_backward_data"),
    **_rows("norm", 6, "native_layer_norm native_group_norm _fused_rms_norm rms_norm"),
    **_rows("norm", 10, "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward"),
    **_rows("batch_norm", 6, "native_batch_norm cudnn_batch_norm miopen_batch_norm"),
    **_rows("batch_norm", 6, "_native_batch_norm_legit _native_batch_norm_legit_no_training"),
    **_rows("batch_norm", 6, "_batch_norm_with_update _batch_norm_no_update batch_norm_elemt"),
    **_rows("batch_norm", 10, "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward"),
    # windows
    **_rows("pool", 1, "max_pool2d_with_indices avg_pool2d max_pool2d_with_indices_backward max_pool3d"),
    **_rows("pool", 1, "avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward max_pool2d"),
    **_rows("pool", 1, "adaptive_max_pool2d adaptive_max_pool2d_backward avg_pool3d avg_pool3d_backward"),
    **_rows("pool", 1, "adaptive_avg_pool2d avg_pool1d max_pool3d_with_indices"),
    **_rows("resize", 2, "upsample_nearest2d upsample_nearest2d_backward _upsample_nearest_exact2d"),
    **_rows("resize", 2, "_upsample_nearest_exact2d_backward upsample_nearest1d upsample_nearest3d"),
    **_rows("resize", 8, "upsample_bilinear2d upsample_bilinear2d_backward _upsample_bilinear2d_aa"),
    **_rows("resize", 32, "upsample_bicubic2d upsample_bicubic2d_backward"),
    # moved, not computed
    **_rows("copy", 0, "clone copy _to_copy contiguous cat stack constant_pad_nd repeat slice_backward"),
    **_rows("copy", 0, "select_backward roll flip as_strided_scatter slice_scatter select_scatter tril triu"),
    **_rows("copy", 0, "diagonal_backward diagonal_scatter reflection_pad2d reflection_pad2d_backward"),
    **_rows("copy", 0, "replication_pad2d pixel_shuffle pixel_unshuffle repeat_interleave unfold_backward"),
    **_rows("copy", 0, "im2col col2im channel_shuffle resize masked_select nonzero view_copy"),
    **_rows("copy", 0, "_reshape_copy split_with_sizes_copy permute_copy expand_copy native_channel_shuffle"),
    **_rows("gather", 0, "embedding index index_select gather take nll_loss_forward nll_loss2d_forward"),
    **_rows("gather", 0, "_embedding_bag grid_sampler_2d _unsafe_index bucketize"),
    **_rows("scatter", 1, "embedding_dense_backward index_put _index_put_impl _unsafe_index_put index_add"),
    **_rows("scatter", 1, "scatter scatter_add index_copy index_fill scatter_reduce masked_scatter"),
    **_rows("fill", 0, "nll_loss_backward nll_loss2d_backward zeros ones full zeros_like ones_like full_like"),
    **_rows("fill", 0, "new_zeros new_ones new_full fill zero scalar_tensor arange eye linspace one_hot"),
    **_rows("fill", 0, "tril_indices triu_indices"),
    **_rows("random", 8, "rand rand_like bernoulli uniform random randint randint_like native_dropout"),
    **_rows("random", 8, "randperm exponential geometric _fused_dropout rrelu_with_noise multinomial"),
    **_rows("random", 30, "randn randn_like normal log_normal cauchy poisson"),
    # nothing to do
    **_rows("none", 0, "empty empty_like empty_strided new_empty new_empty_strided empty_permuted sym_size"),
    **_rows("none", 0, "_local_scalar_dense is_same_size set resize_as lift"),
}
"""Operator name -> family. What is missing is charged for moving its inputs and outputs."""


def name_of(target: str) -> str:
    """The operator's name as FAMILIES knows it: "aten.add_.Tensor" is "add", "aten._softmax.default" "_softmax"."""
    parts = target.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name.removesuffix("_")


def family(target: str) -> Family | None:
    """The operator's family; None where no row declares it."""
    return FAMILIES.get(name_of(target))
