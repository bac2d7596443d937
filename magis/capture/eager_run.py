"""Eager runs of a step, for what a capture on hollow tensors cannot know: strides of results, and branches on data.

Torch's fake tensor functions return some results with other strides than the kernels do, and a branch on data (`if
torch.isfinite(x).all()`) has no outcome if nothing is computed. So the step runs once on real tensors, and a capture
uses the record of that run. A branch becomes an operator that checks its outcome (`magis.ops.call`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from magis.capture.schemas import READS
from magis.graph import Op, Storage, Value

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result."""

_MOST_READ = 1024
"""Maximum number of elements of a list that the graph checks one by one."""


@dataclass(frozen=True)
class Heard:
    """Record of an eager run: layouts of every operator's results, and the booleans and integers that Python read."""

    layouts: Mapping[str, tuple[tuple[_Layout, ...], ...]]
    read: tuple[int, ...]
    expects: bool
    """True if a capture checks, at every step, the numbers that were read and the shapes that depend on data."""


class Listener(TorchDispatchMode):
    """Dispatch mode that records layouts and reads of a step on real tensors."""

    def __init__(self, *, expects: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expects = expects
        self._layouts: dict[str, list[tuple[_Layout, ...]]] = {}
        self._read: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in READS:
            self._read += [out] if isinstance(out, int) else []
        elif func.namespace == "aten" and not func._schema.is_mutable:
            made = tuple(_layout(item) for item in tree_iter(out) if isinstance(item, Tensor))
            self._layouts.setdefault(str(func), []).append(made)
        return out

    def heard(self) -> Heard:
        """Return the record of all calls so far."""
        layouts = {name: tuple(calls) for name, calls in self._layouts.items()}
        return Heard(layouts, tuple(self._read), self._expects)


class Follower:
    """Iterator over the record of an eager run, one operator call after another."""

    def __init__(self, heard: Heard | None) -> None:
        self.heard = heard
        self._calls: Counter[str] = Counter()
        self._read = 0

    @property
    def expects(self) -> bool:
        """True if the capture uses the recorded numbers and data-dependent shapes, and the graph checks them."""
        return self.heard is not None and self.heard.expects

    def rewind(self) -> None:
        """Go back to the first call."""
        self._calls.clear()
        self._read = 0

    def read(self) -> int | None:
        """Return the next boolean or integer that Python read in eager's run; None if the record has none to use."""
        self._read += 1
        if self.heard is None or not self.heard.expects or self._read > len(self.heard.read):
            return None
        return self.heard.read[self._read - 1]

    def made(self, func: Any) -> tuple[Tensor, ...] | None:
        """Return empty tensors with the layouts of this call's results in eager's run; None if the record has none to
        use."""
        if self.heard is None or not self.heard.expects:
            return None
        calls, position = self.heard.layouts.get(str(func), ()), self._calls[str(func)]
        if position >= len(calls):
            return None
        return tuple(torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in calls[position])

    def laid_out(self, func: Any, out: Any) -> Any:
        """Give fake results the strides of eager's run, if this call's results had equal shapes there."""
        if self.heard is None:
            return out
        name = str(func)
        calls = self.heard.layouts.get(name, ())
        position = self._calls[name]
        self._calls[name] += 1
        made = [item for item in tree_iter(out) if isinstance(item, Tensor)]
        if position >= len(calls) or [tuple(item.shape) for item in made] != [shape for shape, *_ in calls[position]]:
            return out
        strides = {id(item): stride for item, (_, stride, _) in zip(made, calls[position], strict=True)}

        def as_heard(item: Tensor) -> Tensor:
            stride = strides[id(item)]
            if item.layout is not torch.strided or item.stride() == stride:
                return item
            return torch.empty_strided(item.shape, stride, dtype=item.dtype, device=item.device)

        return tree_map_only(Tensor, as_heard, out)


def is_of_batch(
    known: Sequence[int], ops: Sequence[Op], values: Mapping[int, Value], storages: Mapping[int, Storage]
) -> bool:
    """Return True if values that operators made depend on the batch, and on no random number."""
    wanted = {values[value].storage for value in known}
    for op in reversed(ops):
        if wanted & ({values[value].storage for value in op.made()} | {storage for storage, _ in op.writes}):
            if op.random:
                return False
            wanted |= {storage for storage, _ in op.reads}
    return any(storages[storage].kind == "batch" for storage in wanted)


def _layout(tensor: Tensor) -> _Layout:
    stride = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
    return tuple(tensor.shape), stride, tensor.dtype


# Methods of tensors that return contents to Python past the dispatcher, unseen by modes.

Reader: TypeAlias = Callable[..., Any]
READERS = ("tolist", "numpy", "__array__", "item")


@contextmanager
def readers_replaced(form: Callable[[str, Reader], Reader]) -> Iterator[None]:
    """Replace the methods of tensors that read contents past the dispatcher by ``form(name, method)``."""
    readers = {name: (name in vars(Tensor), getattr(Tensor, name)) for name in READERS}
    for name, (_, read) in readers.items():
        setattr(Tensor, name, form(name, read))
    try:
        yield
    finally:
        for name, (own, read) in readers.items():
            if own:
                setattr(Tensor, name, read)
            else:
                delattr(Tensor, name)


def by_element(name: str, read: Reader) -> Reader:
    """Make `tolist` of integer tensors read element by element, which modes can see; return other methods unchanged."""
    if name != "tolist":
        return read

    def listed(self: Tensor) -> Any:
        if self.is_floating_point() or self.is_complex() or self.numel() > _MOST_READ:
            return read(self)
        return [listed(part) for part in self.unbind()] if self.dim() else self.item()

    return listed
