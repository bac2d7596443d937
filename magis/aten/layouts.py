"""What kernels return where torch's functions for fake tensors say something else: declined results, layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides

from magis.aten.call import resolve
from magis.aten.facts import CONTIGUOUS_RESULT, ELEMENT_WISE, ROW_BY_ROW
from magis.ir.types import Op

_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def as_made(op: Op, results: tuple[Tensor | None, ...], tensors: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
    """The fake results of ``op`` on ``tensors`` (by value) as its kernel would make them."""
    if op.target in ELEMENT_WISE:
        results = (element_wise(op.target, [tensors[value] for value in op.inputs()], results[0]),)
    if op.target in CONTIGUOUS_RESULT:
        results = row_by_row(op.target, results)
    return tuple(masked(resolve(op.target), op.args, results))


def masked(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """What an operator returned without the results that its ``output_mask`` declines; fakes make those as well."""
    if not isinstance(out, tuple):
        return out
    for argument, mask in zip(func._schema.arguments, args, strict=False):
        if argument.name == "output_mask":
            return tuple(item if wanted else None for item, wanted in zip(out, mask, strict=True))
    return out


def element_wise(target: str, args: Sequence[Any], out: Any) -> Any:
    """What an element-wise operator returned, laid out as its kernel does: by all its operands at once.

    Torch's functions for fake tensors often are chains of operators, and follow the operands one after another.
    """
    if target not in ELEMENT_WISE:
        return out
    strides = compute_elementwise_output_strides(*(arg for arg in args if isinstance(arg, Tensor)))
    return out if out.stride() == strides else torch.empty_strided(out.shape, strides, dtype=out.dtype)


def row_by_row(target: str, out: Any) -> Any:
    """What an operator returned, with the first result in the layout that the kernel gives it."""
    if target in ROW_BY_ROW:
        return tuple(item.contiguous() for item in out)
    first = out[0] if isinstance(out, tuple) else out
    if not isinstance(first, Tensor) or any(
        first.is_contiguous(memory_format=layout)
        for layout in (torch.contiguous_format, *_CHANNELS_LAST.get(first.dim(), ()))
    ):
        return out
    first = first.contiguous()
    return (first, *out[1:]) if isinstance(out, tuple) else first
