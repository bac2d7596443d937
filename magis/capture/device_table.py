"""Operators that a GPU would run in place of the CPU's, substituted while a step is traced on CPU fakes.

Tracing on fake CUDA tensors needs a CUDA build and aborts in autograd without a device. The
fused forms have autograd formulas of their own and trace well on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)


class _CudaForms(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        form = _FORMS.get(func)
        if form is not None:
            return form(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def device_forms(device: str) -> AbstractContextManager[Any]:
    """A context in which functional calls take the forms of ``device`` ("cpu" or "cuda")."""
    return _CudaForms() if device == "cuda" else nullcontext()


def _dropout(func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if not training or p in (0.0, 1.0) or inplace:
        return func(input, p, training, inplace)  # type: ignore[no-any-return]
    return torch.native_dropout(input, p, True)[0]


def _attention(
    func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if torch.is_autocast_enabled("cpu"):  # which the operators below are called past
        query, key, value = (_lowered(t) for t in (query, key, value))
        attn_mask = None if attn_mask is None else _lowered(attn_mask)
    plain = query.dim() == 4 and not enable_gqa and query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    math_only = not torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.mem_efficient_sdp_enabled()
    if math_only or not plain:
        return func(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    if attn_mask is None and query.dtype in _HALF:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=factor)[0]  # type: ignore[no-any-return]
    bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=factor)[0]  # type: ignore[no-any-return]


def _lowered(tensor: Tensor) -> Tensor:
    """As autocast has the inputs of attention."""
    cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype("cpu")) if cast else tensor


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The additive form of a mask, expanded to (batch, heads, queries, keys), as the kernel wants it."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros_like(mask, dtype=query.dtype)
        mask = zeros.masked_fill(mask.logical_not(), -math.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


_FORMS: dict[Any, Callable[..., Tensor]] = {F.dropout: _dropout, F.scaled_dot_product_attention: _attention}
