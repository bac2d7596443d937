"""Halo rows at run time: stretches with the rows around them, taken from a whole tensor and added to one."""

from __future__ import annotations

import torch
from torch import Tensor


def take_rows(whole: Tensor, dim: int, first: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A copy, of this shape and these strides, of the rows of ``dim`` from ``first`` on; zeros outside of the whole."""
    made = torch.empty_strided(shape, stride, dtype=whole.dtype, device=whole.device)
    low, high = _within(whole, dim, first, shape[dim])
    made.narrow(dim, 0, low - first).zero_()
    made.narrow(dim, low - first, high - low).copy_(whole.narrow(dim, low, high - low))
    made.narrow(dim, high - first, first + shape[dim] - high).zero_()
    return made


def add_rows(whole: Tensor, dim: int, first: int, part: Tensor, *, clear: bool) -> None:
    """Add the part to the rows of ``dim`` from ``first`` on, as far as there are such; ``clear``: to zeros."""
    if clear:
        whole.zero_()
    low, high = _within(whole, dim, first, part.shape[dim])
    whole.narrow(dim, low, high - low).add_(part.narrow(dim, low - first, high - low))


def _within(whole: Tensor, dim: int, first: int, count: int) -> tuple[int, int]:
    """The rows from ``first`` on that the tensor has: the first of them, and the one behind the last."""
    return max(first, 0), min(first + count, whole.shape[dim])
