"""Records real calls as the graph's operators: a small recorder for tests that need operators, not a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 (as everywhere)
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


@functools.cache
def steps() -> dict[str, Recording]:
    """A convolution network's and a transformer's step, forward, backward and update, as recorded calls."""
    torch.manual_seed(0)
    image, words = torch.rand(2, 3, 16, 16), torch.zeros(2, 8, dtype=torch.int64)
    vision = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 8, 3, groups=2), torch.nn.Upsample(scale_factor=2), torch.nn.AdaptiveAvgPool2d(5),
        torch.nn.Dropout(0.1), torch.nn.Flatten(), torch.nn.Linear(200, 5),
    )  # fmt: skip
    table = torch.nn.Embedding(30, 16)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
    targets = torch.zeros(2, dtype=torch.int64)

    def see() -> None:
        F.cross_entropy(vision(image), targets).backward()
        torch.optim.AdamW(vision.parameters(), foreach=False).step()

    def read() -> None:
        layer(table(words)).square().mean().backward()
        torch.optim.SGD([*layer.parameters(), *table.parameters()], lr=0.1, momentum=0.9, foreach=False).step()

    return {"vision": record(see), "language": record(read)}
