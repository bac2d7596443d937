"""State that a forward keeps in Python: attributes, counters, cached tables, tensors made in the first call. State that
a capture leaves would be used by the next real call, so it is removed. State that real calls left is an input of the
step, and stays unchanged."""

from __future__ import annotations

import copy
import gc
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from magis.capture.contents import Made, contents_of, is_hollow
from magis.capture.hollow import Hollow, hollow
from magis.capture.schemas import written_by
from magis.capture.snapshot import Snapshot
from magis.capture.workload import Workload
from magis.errors import CaptureError
from magis.ops.averages import averages_named
from magis.ops.generators import generators_kept, held_generators, own_kept
from magis.ops.python_objects import CACHE, DATA, MISSING, cached, holder_of, is_of_module, leave

CACHED = "cached:"
"""Prefix of the names of cached tensors in a graph."""
CACHES = "the caches of functools"


class LeftInCaches:
    """Hollow tensors that a block leaves in function caches; modes in the block add the contents they create to
    ``made``."""

    def __init__(self) -> None:
        self.made: Made = WeakSet()

    def forget(self, *kept: Tensor) -> bool:
        """Clear the caches that hold hollow tensors of the block; return True if there were any. Caches are searched,
        among all objects of the process, only if more than the tensors ``kept`` is still alive."""
        made, expected = set(self.made), {contents_of(tensor) for tensor in kept}
        self.made.clear()
        found = False
        for cache, tensors in _caches() if made - expected else ():
            if any(contents_of(tensor) in made for tensor in tensors):
                cache.cache_clear()
                found = True
        return found


@contextmanager
def caches_kept() -> Iterator[LeftInCaches]:
    """Clear, at the end of the block, caches in which it left hollow tensors."""
    left = LeftInCaches()
    try:
        yield left
    except CaptureError as error:
        inner: BaseException | None = error
        while inner is not None:  # tensors that only frames hold are in no cache
            traceback.clear_frames(inner.__traceback__)
            inner = inner.__cause__ or inner.__context__
        raise
    finally:
        left.forget()


def cached_memory() -> set[int]:
    """Return the addresses of the storages of all tensors in function caches."""
    return {tensor.untyped_storage()._cdata for _, tensors in _caches() for tensor in tensors}


def objects_of(kind: type) -> list[Any]:
    """Return all objects of a type that the garbage collector tracks, frozen ones included."""
    seen = len(gc.get_objects())
    gc.unfreeze()
    objects = gc.get_objects()
    if len(objects) > seen + 1:  # + 1: the first list; gc.get_freeze_count is slower
        gc.freeze()
    return [item for item in objects if type(item) is kind]


def _caches() -> Iterator[tuple[Any, list[Tensor]]]:
    for cache in objects_of(CACHE):
        if not cache.cache_info().currsize:
            continue
        held = [item for item in cached(cache) if isinstance(item, (Tensor, tuple, list))]
        tensors = [each for each in tree_iter(held) if isinstance(each, Tensor) and each.layout is torch.strided]
        if tensors:
            yield cache, tensors


# Copies of modules with tensors that `copy.deepcopy` refuses (non-leaf ones), and with the strides that it loses.


def deep_copy(module: nn.Module) -> nn.Module:
    """Copy a module with `copy.deepcopy`, replacing non-leaf tensors by detached copies (the `weight` of
    `weight_norm`). The copies of weights keep strides with gaps and shared storages, on which the choice of kernels
    depends."""
    made: dict[int, object] = {}
    for part in module.modules():
        for tensor in vars(part).values():
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                made[id(tensor)] = tensor.detach().clone()
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and type(parameter.data) is Tensor and parameter.layout == torch.strided:
            # torch copies a parameter's elements, but any other tensor's whole storage.
            twin = copy.deepcopy(parameter.detach(), made)
            made[id(parameter)] = nn.Parameter(twin, parameter.requires_grad)
    with generators_kept():  # a `__deepcopy__` of the user's may build a module, which draws its weights
        return copy.deepcopy(module, made)


def advance(roots: Mapping[str, object], counted: Iterable[tuple[str, int]]) -> None:
    """Add to numbers, by path, what one forward adds, as in `self.calls += 1`."""
    for path, step in counted:
        found = holder_of(roots, path)
        if found is not None and hasattr(*found):  # else the user deleted the counter
            setattr(*found, getattr(*found) + step)


# One forward before the capture, for modules that create state in their first call.


def settle(
    work: Workload, left: LeftInCaches | None = None, within: AbstractContextManager[object] | None = None
) -> None:
    """Call module and loss once, so that caches, tables and late buffers exist as in every step but the first. Tensors
    and random-number generators are restored; a generator that the call creates is reset to its seed. With ``left``,
    hollow tensors in caches stay until ``left.forget()``. The call runs inside the context ``within``."""
    own = (*work.module.parameters(), *work.module.buffers())
    kept = [(buffer, buffer.detach().clone()) for buffer in work.module.buffers() if not is_hollow(buffer)]
    data, known = [(each, each.data) for each in own], held_generators(work.module, work.loss_fn)
    try:
        with ExitStack() as stack:
            if any(map(is_hollow, (*own, *work.inputs, *work.targets))):  # weights may be real, the batch hollow
                stack.enter_context(averages_named(work.module, {}))  # they read unknown contents
                made = (left or stack.enter_context(caches_kept())).made
                mode: AbstractContextManager[object] = hollow(Hollow(made=made))
            else:
                mode = WritesUndone()
                stack.enter_context(within or nullcontext())
            stack.enter_context(generators_kept())
            stack.enter_context(own_kept(known))
            stack.enter_context(mode)
            work.loss_fn(work.module(*work.inputs), *work.targets)
    finally:
        for tensor, before in data:
            if tensor.untyped_storage()._cdata != before.untyped_storage()._cdata:
                tensor.data = before
        with torch.no_grad():
            for buffer, contents in kept:
                if not torch.equal(buffer, contents):  # batch norm's schema hides its writes to averages
                    buffer.copy_(contents)
    for name, generator in held_generators(work.module, work.loss_fn).items():
        if name not in known:
            generator.manual_seed(generator.initial_seed())


class WritesKept(TorchDispatchMode):
    """Dispatch mode that saves the contents of older storages before operators in the block write to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._known: set[int] = set()
        """Addresses of storages that are already saved, and of those made in the block."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in self._known:
                memory = tensor.untyped_storage()
                self._known.add(memory._cdata)
                self._kept.append((memory, memory.clone()))
        out = func(*args, **(kwargs or {}))
        self._known |= _memory(out) - _memory((args, kwargs))
        return out

    def undo(self) -> None:
        """Restore the contents of all saved storages."""
        for memory, contents in self._kept:
            if memory.nbytes() == contents.nbytes():
                memory.copy_(contents)


class WritesUndone(WritesKept):
    """Dispatch mode that restores, at the end of the block, older storages that the block wrote to."""

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self.undo()


def _memory(items: Any) -> set[int]:
    tensors = (item for item in tree_iter(items) if isinstance(item, Tensor) and item.layout is torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def begun_as(roots: Mapping[str, object], path: str, then: object) -> object:
    """Return the first value of the number at a path: that of the class, if the object has none of its own yet."""
    place = holder_of(roots, path) if then is MISSING else None
    found = None if place is None else getattr(type(place[0]), place[1], None)
    return found if isinstance(found, (int, float)) else then


def put_back(roots: Mapping[str, object], before: Snapshot, paths: Iterable[str]) -> bool:
    """Restore the numbers and tensors at `paths`, which every forward changes, after a settling call. Return True if a
    number was restored. Tensors whose shape changed stay."""
    changed, numbers = frozenset(paths), False
    for path, was, now in [*before.left()]:
        if path not in changed or (holder_of(roots, path) is None and not is_of_module(roots, path)):
            continue
        then = begun_as(roots, path, was)
        if isinstance(then, (int, float)):
            leave(roots, path, then)
            numbers = True
        elif isinstance(then, Tensor) and isinstance(now, Tensor) and now.shape == then.shape:
            leave(roots, path, then)
    return numbers


def tensors_left(roots: Mapping[str, object], kept: Snapshot, memory: Mapping[int, int]) -> dict[str, Tensor]:
    """Return tensors that modules now hold in place of others, by path: attributes, buffers, and the data of parameters
    and buffers, whose old storage addresses are in `memory` by the tensor's `id`."""
    left = ((path, now) for path, _, now in kept.left() if isinstance(now, Tensor) and is_of_module(roots, path))
    data = (
        (f"{path}/{DATA}", tensor)
        for key, (path, tensor) in kept.tensors.items()
        if memory.get(key) not in (None, tensor.untyped_storage()._cdata)
    )
    return {**dict(left), **dict(data)}
