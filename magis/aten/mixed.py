"""Norms of half-precision inputs with float32 weights, as under autocast: what their kernels return.

Torch's functions for fake tensors give the statistics the type of the input, and the input's gradient of a group norm
that of the weight; the kernels do it the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_PARAMETERS = {
    "aten.native_batch_norm.default": (1, 2, 3, 4),
    "aten.native_layer_norm.default": (2, 3),
    "aten.native_group_norm.default": (1, 2),
}
"""Positions of weight, bias and running statistics, behind the input."""


def as_mixed(target: str, args: Sequence[Any], out: Any) -> Any:
    """What the operator ``target`` returned for ``args``, its fake results in the types that kernels give them."""
    if target == "aten.native_group_norm_backward.default":
        return (_typed(out[0], args[1].dtype), *out[1:])
    parameters = [args[at] for at in _PARAMETERS.get(target, ()) if at < len(args)]
    wide = any(isinstance(each, Tensor) and each.dtype == torch.float32 for each in parameters)
    if not wide or args[0].dtype not in _HALF:
        return out
    return (out[0], *(_typed(each, torch.float32) for each in out[1:]))


def _typed(tensor: Any, dtype: torch.dtype) -> Any:
    same = not isinstance(tensor, Tensor) or tensor.dtype == dtype
    return tensor if same else torch.empty_like(tensor, dtype=dtype)
