"""What kernels compute that this machine's torch cannot run: written out from their documentation, in plain torch.

Attention kernels differ in what they return besides the result: the logsumexp's padding and last dimension, lengths of
packed sequences, seeds. Batch norms differ in the order of arguments and in a reserve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Returned = tuple[Tensor | None, ...]


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores if bias is None else scores + bias


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, bias, causal, scale)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, logsumexp: Tensor,
    causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and bias, from the forward's output and logsumexp as they are given."""
    weights = (_scores(query, key, bias, causal, scale) - logsumexp[..., None]).exp()
    inner = weights * (grad @ value.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True))
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    return inner @ key * factor, inner.transpose(-2, -1) @ query * factor, weights.transpose(-2, -1) @ grad, inner


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> Returned:  # fmt: skip
    times = q.shape[1] // k.shape[1]  # several heads of queries may share one of keys
    out, logsumexp = _forward(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), None, causal, scale)
    seed = torch.zeros(2, dtype=torch.int64)
    return out, logsumexp, None, None, None, None, seed, torch.zeros(()), torch.zeros(0)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cum_q: None, cum_k: None, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float | None = None,
) -> Returned:  # fmt: skip
    return _backward(grad, q, k, v, None, out, logsumexp, causal, scale)[:3]


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute: bool, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None,
) -> Returned:  # fmt: skip
    """Pads the logsumexp to multiples of 32 rows, or returns none of it."""
    out, logsumexp = _forward(q, k, v, bias, causal, scale)
    padded = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % 32), value=math.inf)
    seed = torch.zeros((), dtype=torch.int64)
    return out, padded if compute else padded[..., :0], seed, seed.clone()


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, logsumexp: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, mask: list[bool], causal: bool = False, *, scale: float | None = None,
) -> Returned:  # fmt: skip
    found = _backward(grad, q, k, v, bias, out, logsumexp[..., : q.shape[2]], causal, scale)
    return (*found[:3], found[3] if mask[3] else None)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute: bool, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> Returned:  # fmt: skip
    out, logsumexp = _forward(q, k, v, bias, causal, scale)
    seed = torch.zeros((), dtype=torch.int64)
    return out, logsumexp[..., None], None, None, None, None, seed, seed.clone(), None


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, causal: bool, *,
    scale: float | None = None,
) -> Returned:  # fmt: skip
    return _backward(grad, q, k, v, bias, out, logsumexp[..., 0], causal, scale)[:3]


def cudnn_batch_norm(
    x: Tensor, w: Tensor, b: Tensor | None, mean: Tensor | None, var: Tensor | None, training: bool, momentum: float,
    eps: float,
) -> Returned:  # fmt: skip
    found = torch.ops.aten.native_batch_norm.default(x, w, b, mean, var, training, momentum, eps)
    return (*found, torch.zeros(0, dtype=torch.uint8))


def cudnn_batch_norm_backward(
    x: Tensor, grad: Tensor, w: Tensor, mean: Tensor | None, var: Tensor | None, saved_mean: Tensor, saved_var: Tensor,
    eps: float, reserve: Tensor | None = None,
) -> Returned:  # fmt: skip
    backward = torch.ops.aten.native_batch_norm_backward.default
    found: Returned = backward(grad, x, w, mean, var, saved_mean, saved_var, True, eps, [True, True, True])
    return found


def miopen_batch_norm(*args: Any) -> Returned:
    return cudnn_batch_norm(*args)[:3]


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, w: Tensor | None, mask: list[bool]
) -> Returned:
    dims = tuple(range(-len(shape), 0))
    scaled = grad if w is None else grad * w
    normal = x * rstd
    dx = rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
    leading = tuple(range(x.dim() - len(shape)))
    return dx if mask[0] else None, (grad * normal).sum(leading) if mask[1] else None


KERNELS: dict[str, Callable[..., Returned]] = {
    "aten._scaled_dot_product_flash_attention.default": flash,
    "aten._scaled_dot_product_flash_attention_backward.default": flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": efficient_backward,
    "aten._scaled_dot_product_cudnn_attention.default": cudnn,
    "aten._scaled_dot_product_cudnn_attention_backward.default": cudnn_backward,
    "aten.cudnn_batch_norm.default": cudnn_batch_norm,
    "aten.cudnn_batch_norm_backward.default": cudnn_batch_norm_backward,
    "aten.miopen_batch_norm.default": miopen_batch_norm,
    "aten.miopen_batch_norm_backward.default": cudnn_batch_norm_backward,
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
}
