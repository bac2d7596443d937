"""What eager writes in place, but not while it is watched.

Autograd adds up the gradients of a tensor with several readers in place, and scatters into the zeros that it made for
the purpose, when it holds the only reference. Under a dispatch mode, or with fake tensors, it plays safe and makes a
new tensor (torch/csrc/autograd/input_buffer.cpp, FunctionsManual.cpp). Whoever watches eager to learn how much memory
it needs must undo that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_SELECTED = ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk")
_IN_PLACE: dict[Any, tuple[Any, int, tuple[str, ...]]] = {
    torch.ops.aten.add.Tensor: (torch.ops.aten.add_.Tensor, 0, ()),
    torch.ops.aten.scatter_add.default: (torch.ops.aten.scatter_add_.default, 0, ("Gather", "Cummax", "Cummin")),
    torch.ops.aten.scatter.src: (torch.ops.aten.scatter_.src, 0, _SELECTED),
    torch.ops.aten.index_put.default: (torch.ops.aten.index_put_.default, 1, ("Index",)),
}
"""Operator -> its in-place form, how many references more than an addition its call itself holds, and whose backward
formulas call it on zeros of their own (empty: sums of gradients, by the engine). Other formulas, that of `index_put`
itself say, call the same operator on a gradient that they go on reading."""


@dataclass(frozen=True)
class Unwatched:
    """Tells from within a dispatch mode what eager would do without it. Make one with ``unwatched`` beforehand."""

    alone: tuple[int, int]
    """References on a gradient and on its storage where autograd holds the only one."""

    def form(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The operator that autograd would have called in place of ``func``; mostly ``func`` itself."""
        form, held, formulas = _IN_PLACE.get(func, (None, 0, ()))
        node: Any = torch._C._current_autograd_node()
        if form is None or node is None or torch.is_grad_enabled():
            return func
        if formulas and node.name().rstrip("0123456789").removesuffix("Backward") not in formulas:
            return func
        first, others = args[0], [arg for arg in args[1:] if isinstance(arg, Tensor)]
        if func is torch.ops.aten.add.Tensor:
            plain = kwargs.get("alpha", 1) == 1 and len(others) == 1
            if not plain or (others[0].shape, others[0].dtype) != (first.shape, first.dtype):
                return func
        tensor, storage = self.alone
        return form if _references(first) == (tensor + held, storage) and _dense(first) else func


def _dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side without overlap, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _references(tensor: Any) -> tuple[int, int]:
    """References on a tensor and on its storage, with those that asking from a dispatch mode adds."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = (0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and torch._C._current_autograd_node() is not None:
            self.seen = _references(args[0])
        return func(*args, **(kwargs or {}))


def unwatched() -> Unwatched:
    """Finds out how many references a dispatch mode sees on a gradient that only autograd holds: it adds up two."""
    watch = _Watch()
    with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes():
        x = torch.ones(2, requires_grad=True) * 1
        y = (x.exp() + x.sin()).sum()
        with watch:
            torch.autograd.backward(y)
    return Unwatched(watch.seen)
