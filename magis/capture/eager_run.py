"""Run a step eagerly for a capture that cannot know all: layouts of results, and ways that branches take.

Torch's functions for fake tensors give some results other strides than kernels do, and a branch on data
(`if torch.isfinite(x).all()`) has no answer where nothing is computed. So the step is run once on real tensors; a
capture then follows what was heard. What it branches on becomes an expectation of the graph (`magis.ops.call`).
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
"""Shape, strides and data type of a result."""

_MOST_READ = 1024
"""Elements of a list that become expectations one by one."""


@dataclass(frozen=True)
class Heard:
    """Layouts of every operator's results, call by call, and the truth values and whole numbers that Python read."""

    layouts: Mapping[str, tuple[tuple[_Layout, ...], ...]]
    read: tuple[int, ...]
    expects: bool
    """True if a capture takes what was read, and shapes that depend on data, as expectations."""


class Listener(TorchDispatchMode):
    """Hears a step on real tensors."""

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
        """Everything so far."""
        layouts = {name: tuple(calls) for name, calls in self._layouts.items()}
        return Heard(layouts, tuple(self._read), self._expects)


class Follower:
    """Goes through what was heard, one operator after another."""

    def __init__(self, heard: Heard | None) -> None:
        self.heard = heard
        self._calls: Counter[str] = Counter()
        self._read = 0

    @property
    def expects(self) -> bool:
        """True if reads and shapes that depend on data are expected to be as in eager's run."""
        return self.heard is not None and self.heard.expects

    def rewind(self) -> None:
        """From the first call on again."""
        self._calls.clear()
        self._read = 0

    def read(self) -> int | None:
        """The next truth value or whole number that Python reads; None where no expectation can be made of it."""
        self._read += 1
        if self.heard is None or not self.heard.expects or self._read > len(self.heard.read):
            return None
        return self.heard.read[self._read - 1]

    def made(self, func: Any) -> tuple[Tensor, ...] | None:
        """Results such as this call of the operator made in eager's run; None where none can be expected."""
        if self.heard is None or not self.heard.expects:
            return None
        calls, position = self.heard.layouts.get(str(func), ()), self._calls[str(func)]
        if position >= len(calls):
            return None
        return tuple(torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in calls[position])

    def laid_out(self, func: Any, out: Any) -> Any:
        """Fake results with eager's strides, where this call of the operator made such shapes."""
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
    """Return True if values that operators have made depend on the batch, and on no random number."""
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


# Methods of tensors that hand Python their contents past the dispatcher, where no mode sees it.

Reader: TypeAlias = Callable[..., Any]
READERS = ("tolist", "numpy", "__array__", "item")


@contextmanager
def readers_replaced(form: Callable[[str, Reader], Reader]) -> Iterator[None]:
    """In the block such methods are what ``form`` makes of a name and the method."""
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
    """`tolist` of whole numbers as one read for each of them, which modes hear; other methods as they are."""
    if name != "tolist":
        return read

    def listed(self: Tensor) -> Any:
        if self.is_floating_point() or self.is_complex() or self.numel() > _MOST_READ:
            return read(self)
        return [listed(part) for part in self.unbind()] if self.dim() else self.item()

    return listed
