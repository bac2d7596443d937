"""Autograd's formulas of products, which look for zeros: eager divides by each factor where there are none.

Under a dispatch mode torch does not look, and takes a longer way that holds for zeros, too, and rounds otherwise. So
while a step is watched, `prod` and `cumprod` have their formulas here, with the question as a truth value that Python
reads: an expectation of the graph, as any branch on data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from magis.errors import CaptureError

__all__ = ["products_as_eager"]

_ATEN = torch.ops.aten


@contextmanager
def products_as_eager() -> Iterator[None]:
    """While it lasts, gradients of products on the CPU are eager's, whoever watches."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            library.impl("prod", _whole, "AutogradCPU")
            library.impl("prod.dim_int", _along, "AutogradCPU")
            library.impl("cumprod", _running, "AutogradCPU")
            library.impl("cumprod_", _in_place, "AutogradCPU")
        yield
    finally:
        library._destroy()


class _Product(torch.autograd.Function):
    """The product of everything, or along a dimension (with or without it in the result)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
        result: Tensor = _ATEN.prod(x, dtype=dtype) if dim is None else _ATEN.prod(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, result = ctx.saved_tensors
        return _product_gradient(grad, x.to(grad.dtype), result, ctx.dim, keepdim=ctx.keepdim), None, None, None


def _product_gradient(grad: Tensor, x: Tensor, result: Tensor, dim: int | None, *, keepdim: bool) -> Tensor:
    if x.dim() == 0:
        return grad
    if dim is not None and not keepdim:
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    if dim is None:
        if not bool((x == 0).any()):
            return grad * (result / x).conj()
        if bool((x == 0).sum() > 1):
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        return _by_others(grad, x.contiguous().view(-1), 0).view_as(x)
    zeros = x == 0
    counts = zeros.sum(dim, keepdim=True)  # memory that eager holds to the end of its formula
    if bool(counts.sum() != 0):
        return _by_others(grad, x, dim)
    return grad * (result / x).conj()


def _by_others(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """By the product of those before and those behind, for each factor."""
    size = x.shape[dim]
    if x.numel() == 0:
        return grad.expand_as(x)
    if size == 1:
        return grad
    ones = torch.ones([1 if at == dim % x.dim() else n for at, n in enumerate(x.shape)], dtype=grad.dtype)
    shifted = torch.cat([ones, x.narrow(dim, 0, size - 1)], dim)
    before = shifted.cumprod(dim)
    turned = x.narrow(dim, 1, size - 1).flip(dim)
    back = torch.cat([ones, turned], dim)
    del ones, turned
    behind = back.cumprod(dim).flip(dim)
    return grad * (before * behind).conj()


class _Running(torch.autograd.Function):
    """Products up to each element along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        result: Tensor = _ATEN.cumprod(x, dim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, result = ctx.saved_tensors
        return _running_gradient(grad.to(x.dtype), x, result, ctx.dim), None, None


def _running_gradient(grad: Tensor, x: Tensor, result: Tensor, dim: int) -> Tensor:
    if x.numel() <= 1 or x.shape[dim] == 1:
        return grad
    weights, zeros = result.conj() * grad, x == 0
    if bool(zeros.any()):
        del weights, zeros
        made: Tensor = _ATEN.cumprod_backward(grad, x, dim, result)
        return made
    return _sums_behind(weights, dim).div(x.conj())


def _sums_behind(weights: Tensor, dim: int) -> Tensor:
    """Of each element and those behind it. Eager frees what it makes on the way at the end."""
    turned = weights.flip(dim)
    sums = turned.cumsum(dim)
    return sums.flip(dim)


def _whole(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    if _is_graded(x):
        return _Product.apply(x, None, False, dtype)  # type: ignore[no-untyped-call, no-any-return]
    return _below(_ATEN.prod.default, x, dtype=dtype)


def _along(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if _is_graded(x):
        return _Product.apply(x, dim, keepdim, dtype)  # type: ignore[no-untyped-call, no-any-return]
    return _below(_ATEN.prod.dim_int, x, dim, keepdim, dtype=dtype)


def _running(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if _is_graded(x):
        return _Running.apply(x, dim, dtype)  # type: ignore[no-untyped-call, no-any-return]
    return _below(_ATEN.cumprod.default, x, dim, dtype=dtype)


def _in_place(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if _is_graded(x):
        raise CaptureError(
            "cumprod_ is called on a tensor that has a gradient, and its formula looks for zeros", hint="use cumprod"
        )
    return _below(_ATEN.cumprod_.default, x, dim, dtype=dtype)


def _is_graded(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _below(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """The call past autograd; an in-place one tells autograd that the tensor is another by now."""
    with torch._C._AutoDispatchBelowAutograd():
        made: Tensor = call(*args, **kwargs)
    return made
