"""Other rounding errors in eager's backwards, which tell how far off a plan with sums in another order may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["OtherRounding"]

ERROR = 2.0
"""The largest error of a result, in its data type's epsilons."""


class OtherRounding(TorchDispatchMode):
    """Changes what the operators of a backward compute by random rounding errors; `sign` -1 turns them all round."""

    def __init__(self, seed: int, sign: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)
        self._sign = sign

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # no forward that checkpointing runs again, no view, nothing written in place
        formula = torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()
        if formula and not any(each.alias_info for each in func._schema.returns):
            for result in tree_leaves(made):
                if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
                    self._disturb(result)
        return made

    def _disturb(self, result: Tensor) -> None:
        share = (2 * torch.rand(result.shape, generator=self._generator) - 1) * self._sign * ERROR
        result.add_(result * (share * torch.finfo(result.dtype).eps).to(result.dtype))
