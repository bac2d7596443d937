"""What tensors a step may handle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from magis.aten.bits import bits_of
from magis.errors import CaptureError

__all__ = ["ONLY_DENSE", "check_dense", "layout_problem", "tensors_in", "window"]

ONLY_DENSE = "only dense, strided tensors can be captured"


def tensors_in(item: Any) -> Iterator[Tensor]:
    """The tensors of an operator's arguments or results."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from tensors_in(part)


def check_dense(item: Any) -> None:
    """Raise CaptureError for a tensor among arguments or results that is no window on plain memory."""
    for tensor in tensors_in(item):
        problem = layout_problem(tensor)
        if problem:
            raise CaptureError(f"the step handles a tensor that is {problem}", hint=ONLY_DENSE)


def layout_problem(tensor: Tensor) -> str:
    """What keeps a tensor from being a strided window on plain memory; empty if nothing does."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "quantized" if tensor.is_quantized else ""


def window(tensor: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from others: autograd hands out new objects for what it saved, on the same part of memory."""
    return (
        tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()),
        tensor.dtype, bits_of(tensor),
    )  # fmt: skip
