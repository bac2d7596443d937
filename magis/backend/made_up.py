"""Made-up arguments for an operator: tensors of the right shapes, strides and types that hold harmless numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from magis.aten.bits import with_bits
from magis.ir.types import Op, Value

__all__ = ["make_tensors", "reach"]


def make_tensors(op: Op, values: Mapping[int, Value], device: torch.device | str = "cpu") -> dict[int, torch.Tensor]:
    """Made-up tensors for the inputs of `op` by value id: exact shapes, strides and types, storages apart.

    The numbers come from a fixed seed and are the same for every call.
    """
    generator = torch.Generator(device).manual_seed(0)
    return {number: _tensor(values[number], generator) for number in dict.fromkeys(op.inputs())}


def _tensor(value: Value, generator: torch.Generator) -> torch.Tensor:
    """A tensor as `value` describes it, at offset 0 of a storage that is just large enough."""
    dtype: torch.dtype = getattr(torch, value.dtype)
    length = reach(value)
    flat: torch.Tensor
    if dtype == torch.bool:
        flat = torch.rand(length, generator=generator, device=generator.device) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        flat = torch.rand(length, generator=generator, device=generator.device).add_(1).mul_(0.5).to(dtype)
    else:
        flat = torch.zeros(length, dtype=dtype, device=generator.device)
    # filled before it is strided: an expanded tensor (stride 0) cannot be written in place
    return with_bits(flat.as_strided(value.shape, value.stride), value.bits)


def reach(value: Value) -> int:
    """Elements from the first to the last that the strides touch."""
    if value.numel == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
