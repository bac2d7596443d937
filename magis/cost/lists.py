"""Operators on lists of tensors (``_foreach_*``, ``_fused_*``): how many kernels a GPU runs for one call.

A kernel gets the addresses of as many tensors as fit into its arguments, in pieces of 65,536 elements with a block of
threads each (ATen/native/cuda/MultiTensorApply.cuh). The call starts another one as soon as it is full of either. A CPU
runs the plain operator, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from magis.ir.types import Arg, Op, Ref, Value

__all__ = ["counts", "is_on_lists"]

CHUNK = 65_536
MOST_BLOCKS = 320
MOST_TENSORS = (110, 64, 48, 36, 30)
"""Tensors of a list that one kernel takes, by the number of lists."""
MOST_WITH_NUMBERS = (96, 64, 48, 36, 30)
"""The same where each tensor has a number of its own."""


def is_on_lists(target: str) -> bool:
    """Whether the operator goes through lists of tensors, one tensor like the other."""
    return target.startswith(("aten._foreach_", "aten._fused_")) and not target.startswith("aten._fused_rms_norm")


def counts(op: Op, values: Mapping[int, Value]) -> tuple[int, int]:
    """Tensors that one call goes through, and the kernels that a GPU runs for it; 1 and 1 of other operators."""
    lists = [arg for arg in op.args if isinstance(arg, tuple) and arg and isinstance(arg[0], Ref)]
    if not lists or not is_on_lists(op.target):
        return 1, 1
    sizes = [values[item.value].numel for item in lists[0] if isinstance(item, Ref)]
    lists = [each for each in lists if not _are_counters(each, values, sizes)]
    depth = min(max(1, len(lists) + bool(op.made())), len(MOST_TENSORS))
    most = (MOST_WITH_NUMBERS if op.target.endswith(".ScalarList") else MOST_TENSORS)[depth - 1]
    return len(sizes), _kernels(sizes, most)


def _are_counters(given: tuple[Arg, ...], values: Mapping[int, Value], sizes: list[int]) -> bool:
    """Whether a list holds counters of steps beside larger tensors: these are no operands, but numbers."""
    return max(sizes) > 1 and all(isinstance(item, Ref) and values[item.value].shape == () for item in given)


def _kernels(sizes: list[int], most: int) -> int:
    kernels = tensors = blocks = 0
    for size in sizes:
        chunks = -(-size // CHUNK)
        if not chunks:
            continue
        tensors += 1
        for chunk in range(chunks):
            blocks += 1
            whole = chunk == chunks - 1
            if blocks == MOST_BLOCKS or (tensors == most and whole):
                kernels, blocks = kernels + 1, 0
                tensors = 0 if whole else 1
    return max(1, kernels + bool(blocks))
