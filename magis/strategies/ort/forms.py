"""Operators written out as others that ONNX has a form of, where torch's own decompositions do not go that far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from magis.errors import UsageError

__all__ = ["FORMS"]

_aten: Any = torch.ops.aten


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """The two formulas of torch's kernel; torch's decomposition computes both and chooses per element."""
    if abs(weight) < 0.5:
        return start + (end - start) * weight
    return end - (end - start) * (1 - weight)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax that is 0 where a whole row is masked; that is seen by the row's maximum, not by all its elements."""
    x = x if dtype is None else x.to(dtype)
    masked = x.amax(dim, keepdim=True) == -torch.inf
    return torch.where(masked, 0.0, torch.softmax(x, dim))


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, saved mean and 1 / deviation, and both new statistics; ONNX keeps the variance of the sample instead."""
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    dtype, x = x.dtype, x.to(running_mean.dtype)  # statistics stay in float32 under autocast

    def wide(vector: Tensor) -> Tensor:
        return vector.view([1, -1, *[1] * (x.dim() - 2)])

    mean, variance = running_mean, running_var
    centered = x - wide(mean)
    if training:
        mean = x.mean(dims)
        centered = x - wide(mean)
        variance = (centered * centered).mean(dims)
        running_mean = running_mean * (1 - momentum) + mean * momentum
        running_var = running_var * (1 - momentum) + variance * (momentum * count / max(count - 1, 1))
    scale = torch.rsqrt(variance + eps)
    out = centered * wide(scale if weight is None else scale * weight)
    if bias is not None:
        out = out + wide(bias)
    empty = x.new_zeros(0)
    return out.to(dtype), (mean if training else empty), (scale if training else empty), running_mean, running_var


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,  # noqa: ARG001  (torch's signature)
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],  # noqa: ARG001
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The input's gradient is a convolution the other way round, the weight's one in which batch and channels change
    places: every tensor is as long as it was, the strides become dilations."""
    dims = x.dim() - 2
    stride, padding, dilation = (list(each) * (dims if len(each) == 1 else 1) for each in (stride, padding, dilation))
    to_x = to_weight = to_bias = None
    if wanted[0]:
        # what a stride cuts off at the end is part of the input all the same
        missing = [
            0
            if transposed
            else x.shape[i + 2]
            - ((gradient.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[i + 2] - 1) + 1)
            for i in range(dims)
        ]
        to_x = _aten.convolution(gradient, weight, None, stride, padding, dilation, not transposed, missing, groups)
    if wanted[1]:
        if groups != 1:
            raise UsageError(
                f"ONNX Runtime cannot train a convolution of {groups} groups: the weight's gradient has no ONNX form",
                hint="leave out the strategy ort for this network",
            )
        wide, narrow = (gradient, x) if transposed else (x, gradient)
        found = _aten.convolution(
            wide.transpose(0, 1), narrow.transpose(0, 1), None, dilation, padding, stride, False, [0] * dims, 1
        )
        for i in range(dims):
            found = found.narrow(i + 2, 0, weight.shape[i + 2])
        to_weight = found.transpose(0, 1)
    if wanted[2]:
        to_bias = gradient.sum([0, *range(2, gradient.dim())])
    return to_x, to_weight, to_bias


FORMS: Mapping[Any, Callable[..., Any]] = {
    _aten.lerp.Scalar: _lerp,
    _aten._safe_softmax.default: _safe_softmax,
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten.convolution_backward.default: _convolution_backward,
}
"""Operator -> what it is made of; they come before torch's core decompositions."""
