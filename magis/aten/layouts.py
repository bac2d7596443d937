"""What kernels return where torch's functions for fake tensors say something else: declined results, layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magis.aten.call import resolve
from magis.aten.facts import CONTIGUOUS_RESULT
from magis.ir.types import Op

_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def as_made(op: Op, results: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The fake results of ``op`` as its kernel would make them."""
    if op.target in CONTIGUOUS_RESULT:
        results = row_by_row(results)
    return tuple(masked(resolve(op.target), op.args, results))


def masked(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """What an operator returned without the results that its ``output_mask`` declines; fakes make those as well."""
    if not isinstance(out, tuple):
        return out
    for argument, mask in zip(func._schema.arguments, args, strict=False):
        if argument.name == "output_mask":
            return tuple(item if wanted else None for item, wanted in zip(out, mask, strict=True))
    return out


def row_by_row(out: Any) -> Any:
    """What an operator returned, with the first result in the layout that the kernel gives it."""
    first = out[0] if isinstance(out, tuple) else out
    if not isinstance(first, Tensor) or any(
        first.is_contiguous(memory_format=layout)
        for layout in (torch.contiguous_format, *_CHANNELS_LAST.get(first.dim(), ()))
    ):
        return out
    first = first.contiguous()
    return (first, *out[1:]) if isinstance(out, tuple) else first
