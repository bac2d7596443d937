"""A model at other sizes of its batch, and the largest size of which something holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from magis.capture import Workload
from magis.errors import UsageError

__all__ = ["extent", "largest", "resized"]


def extent(work: Workload, dim: int) -> int:
    """The extent of the first input along a dimension. Raises UsageError where it has no such dimension, or nothing."""
    shape = tuple(work.inputs[0].shape) if work.inputs else ()
    if dim >= len(shape) or shape[dim] < 1:
        raise UsageError(
            f"{work.name}: the first input, of shape {list(shape)}, has nothing along dimension {dim}",
            hint="choose another dimension, or name a keyword of the factory",
        )
    return shape[dim]


def resized(work: Workload, dim: int, size: int) -> Workload:
    """The workload with ``size`` in place of the first input's extent along ``dim``, in every input and target that has
    the same extent there; rows repeat, so that class numbers stay valid. Works on fake tensors."""
    before = extent(work, dim)

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim <= dim or tensor.shape[dim] != before:
            return tensor
        return tensor.index_select(dim, torch.arange(size, device=tensor.device) % before)

    return replace(
        work,
        inputs=tuple(change(tensor) for tensor in work.inputs),
        targets=tuple(change(tensor) for tensor in work.targets),
    )


def largest(fits: Callable[[int], bool], start: int, most: int, *, precision: float = 0.0) -> int | None:
    """The largest size from 1 to ``most`` that fits, where every smaller one fits too; None where 1 does not.

    By doubling or halving from ``start``, then bisection, which ends within ``precision`` (a share of the size) of the
    next size that does not fit.
    """
    low, high = 0, most + 1  # low fits, high does not
    size = min(start, most)
    while low + 1 < high:
        if fits(size):
            low = size
        else:
            high = size
        if low and high <= most:
            if high - low <= max(1.0, precision * low):
                break
            size = (low + high) // 2
        else:
            size = min(2 * size, most) if low else size // 2
        if size in (0, low, high):
            break
    return low or None
