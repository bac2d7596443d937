"""Comparison of checkpointed blocks with their recomputation while a step is captured.

Torch restores the default generators before it recomputes a block, and a policy skips writes to the block's buffers.
Nothing restores other generators, counters and other Python state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from magis.capture.schemas import tensors_in, written_by
from magis.extensions.compile.checkpointing.policy import (
    CheckpointedRegion,
    is_weight_cast,
    may_be_left_out,
    memory,
    wrapped,
)
from magis.extensions.compile.checkpointing.remat_regions import forward_as
from magis.ops.generators import HostGenerators, same_generator
from magis.ops.operators import op_info


@contextmanager
def _forwards(
    module: nn.Module, paths: Sequence[str], make: Callable[[nn.Module, str], Callable[..., Any]]
) -> Iterator[None]:
    """Replace the forwards of a module's blocks, within a `with` block, by those that ``make`` returns."""
    with ExitStack() as stack:
        for path in paths:
            block = module.get_submodule(path)
            stack.enter_context(forward_as(block, make(block, path)))
        yield


def under(
    module: nn.Module, regions: Sequence[CheckpointedRegion], library: str, seen: Mapping[str, Runs] | None
) -> AbstractContextManager[None]:
    """Checkpoint a module's blocks while a step is captured, which draws no random numbers.

    ``seen`` records the calls of each block, and the operators that they run.
    """
    by_path = {region.path: region for region in regions}

    def make(block: nn.Module, path: str) -> Callable[..., Any]:
        if seen is None:
            return wrapped(by_path[path], block, block.forward, library=library, preserve_rng_state=False)
        runs = seen[path]
        body = runs.watched(block.forward)
        run = wrapped(by_path[path], block, body, library=library, preserve_rng_state=False, seen=runs.names.append)

        def forward(*args: Any, **kwargs: Any) -> Any:
            runs.calls += 1
            return run(*args, **kwargs)

        return forward

    return _forwards(module, [*by_path], make)


def drawing(module: nn.Module, blocks: Sequence[str], left: dict[str, str]) -> AbstractContextManager[None]:
    """Record in ``left``, while a step is captured, the blocks that cannot be recomputed: they draw from generators
    other than torch's default ones, read numbers off tensors, count their calls, or write to outside memory."""

    def make(block: nn.Module, path: str) -> Callable[..., Any]:
        own = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            hosts, numbers = HostGenerators(), _plain_attributes(block)
            with _Calls(block) as calls:
                out = own(*args, **kwargs)
            if hosts.moved() or calls.draws:
                left[path] = "it draws from Python's, numpy's or its own generator"
            elif calls.reads:
                left[path] = "it reads a number off a tensor"
            elif _plain_attributes(block) != numbers:
                left[path] = "it counts its calls"
            elif calls.writes:
                left[path] = "it writes to memory that outlives it and is no buffer of it"
            return out

        return forward

    return _forwards(module, blocks, make)


def _plain_attributes(block: nn.Module) -> dict[tuple[str, str], object]:
    """Return the int, float, bool and str attributes of a block and its sub-modules."""
    parts = block.named_modules()
    return {(path, name): it for path, part in parts for name, it in vars(part).items() if type(it) in _PLAIN}


_PLAIN = (int, float, bool, str)


@dataclass
class Runs:
    """Operators that a block runs in one step, in its forward and in its recomputations."""

    calls: int = 0
    names: list[str] = field(default_factory=list)
    made: list[_Calls] = field(default_factory=list)
    held: list[torch.UntypedStorage] = field(default_factory=list)
    """Storages met so far, kept alive so that their identities stay unique."""

    def forget(self) -> None:
        """Clear all records."""
        self.calls = 0
        self.names.clear()
        self.made.clear()
        self.held.clear()

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that records its operators at each run."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.made.append(_Calls(None, self.held))
            with self.made[-1]:
                return forward(*args, **kwargs)

        return run

    def alike(self) -> bool:
        """Return True if every recomputation runs the same operators as the forward, up to where it stops.

        A recomputation stops as soon as the backward has the tensors that it needs.
        """
        first, *again = [each.calls for each in self.made]
        return all(each == first[: len(each)] for each in again)


class _Calls(TorchDispatchMode):
    """Dispatch mode that records operators with their arguments; numbers computed in Python are recorded by value."""

    def __init__(self, block: nn.Module | None, held: list[torch.UntypedStorage] | None = None) -> None:
        """Record to ``held`` all storages met, which keeps their identities unique; None: keep no storage alive."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = set() if block is None else {memory(each) for each in block.buffers()}
        self._held = held
        self._made: dict[int, str] = {}
        self.calls: list[tuple[str, ...]] = []
        self.writes = False
        """True once an operator writes to memory from outside the block, which a recomputation would write again."""
        self.draws = False
        """True once an operator draws from a generator other than the default one."""
        self.reads = False
        """True once Python reads a number off a tensor (`item()`)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        given = [each for each in leaves if isinstance(each, torch.Generator)]
        self.draws = self.draws or not all(same_generator(each, torch.default_generator) for each in given)
        self.reads = self.reads or func is torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 (its name)
        written = written_by(func, args, kwargs or {})
        spared = op_info(str(func)).undeclared_writes(args) or may_be_left_out(func, args, written, self._buffers)
        self.writes = self.writes or (not spared and any(memory(each) not in self._made for each in written))
        cast = is_weight_cast(func, args)
        noted = func is not torch.ops.aten.detach.default and not cast  # added by checkpointing itself
        if noted:
            fresh = func is torch.ops.aten.lift_fresh.default
            looks = (self._look(each, fresh=fresh) if isinstance(each, Tensor) else repr(each) for each in leaves)
            self.calls.append((str(func), *looks))
        met = {memory(each) for each in leaves if isinstance(each, Tensor)}
        out = func(*args, **(kwargs or {}))
        for number, each in enumerate(tensors_in(out)):
            if memory(each) not in met:
                self._name(each, _cast_of(args[0]) if cast else f"made {len(self.calls)} {number}")
        return out

    def _name(self, tensor: Tensor, name: str) -> None:
        self._made[memory(tensor)] = name
        if self._held is not None:
            self._held.append(tensor.untyped_storage())

    def _look(self, tensor: Tensor, *, fresh: bool) -> str:
        """Describe a tensor: one made in this run by its index in the run, any other by the identity of its storage.

        A tensor just created from Python numbers is described by its values.
        """
        if fresh and memory(tensor) not in self._made:
            with _disable_current_modes():
                return repr((tensor.dtype, tensor.tolist()))
        weight = _weight_under(tensor)
        if memory(tensor) not in self._made and self._held is not None:
            self._held.append(tensor.untyped_storage())
        name = self._made.get(memory(tensor)) or (str(memory(tensor)) if weight is None else _cast_of(weight))
        return f"{name} {tensor.storage_offset()} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"


def _cast_of(weight: Tensor) -> str:
    return f"cast of {memory(weight)}"


def _weight_under(tensor: Tensor) -> Tensor | None:
    """Return the trained weight that a tensor is a cast of, since autocast caches casts across blocks; else None."""
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 (what a view is of)
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    weight: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return weight
