"""Records real calls as the graph's operators: a small recorder for tests that need operators, not a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from magis.graph.nodes import Arg, Op, Ref, Value
from magis.ops.call import from_torch, outputs


class Recording(TorchDispatchMode):
    """Collects `calls` (operators as they ran) and `values` (their tensors, which it keeps alive)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Op] = []
        self.values: dict[int, Value] = {}
        self._seen: dict[tuple[Any, ...], int] = {}
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace != "aten":  # the profiler's marks
            return func(*args, **(kwargs or {}))
        given = tuple(self._arg(arg) for arg in args)
        named = tuple((name, self._arg(arg)) for name, arg in (kwargs or {}).items())
        result = func(*args, **(kwargs or {}))
        made = tuple(None if tensor is None else self._value(tensor) for tensor in outputs(result))
        if result is None or result == []:
            made = ()
        self.calls.append(Op(len(self.calls), str(func), given, named, made))
        return result

    def _arg(self, arg: object) -> Arg:
        if isinstance(arg, torch.Tensor):
            return Ref(self._value(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item) for item in arg)
        return from_torch(arg)

    def _value(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()._cdata
        key = (storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if key not in self._seen:
            number = self._seen[key] = len(self._seen)
            self._alive.append(tensor.detach())
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.values[number] = Value(
                number, tuple(tensor.shape), tensor.stride(), dtype, storage, tensor.storage_offset()
            )
        return self._seen[key]


def record(fn: Callable[[], object]) -> Recording:
    """Run `fn` and return its calls, with autograd's among them."""
    recording = Recording()
    with recording:
        fn()
    return recording
