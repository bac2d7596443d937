"""Storages of hollow tensors (`magis.capture.hollow`), and the record of which contents are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from magis.capture.untouched_memory import untouched

MARK = "_magis_contents"
TWIN = "twin"
READABLE_BYTES = 1 << 16


@dataclass(slots=True, eq=False, weakref_slot=True)
class Contents:
    """Record of a storage's contents, kept as an attribute of the storage."""

    known: bool
    sources: frozenset[str] = frozenset()
    """Named tensors on whose contents the known bytes depend."""
    owner: object = None
    """The mode under which the storage was made, or `TWIN`; a mode writes only to storages of its own and to twins."""
    drawn: bool = False
    """True if the bytes are random numbers, or computed from random numbers and known bytes only."""
    unit: bool = False
    """True if the bytes are unchanged random numbers from [0, 1)."""
    recipe: Recipe | None = None
    """Function that recomputes the contents from named tensors; None if there is none."""
    meta: torch.UntypedStorage | None = None
    fakes: dict[tuple[Any, ...], FakeTensor] = field(default_factory=dict)


Recipe: TypeAlias = Callable[[Mapping[str, Tensor]], tuple[Tensor, int]]
"""Recomputes known contents from live tensors by name; returns a tensor and its storage offset in the capture."""
Made: TypeAlias = "WeakSet[Contents]"  # records of live storages that modes made


def empty_storage(nbytes: int, contents: Contents) -> torch.UntypedStorage:
    """Return a new storage whose memory is never touched, with a record of its contents."""
    storage = untouched(nbytes)
    setattr(storage, MARK, contents)
    return storage


def on_storage(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor with the metadata of another one, on a given storage."""
    with _disable_current_modes():
        made = torch.empty(0, dtype=like.dtype)
        made.set_(storage, int(like.storage_offset()), tuple(like.shape), tuple(like.stride()))
        if like.is_conj():
            made = torch._conj(made)
        return torch._neg_view(made) if like.is_neg() else made


def is_hollow(tensor: Tensor) -> bool:
    """Return True if a tensor is hollow: its contents were never computed."""
    contents = contents_of(tensor)
    return contents is not None and not contents.known


def contents_of(tensor: Tensor) -> Contents | None:
    """Return the record of a tensor's contents; None if no mode has met its storage."""
    return getattr(tensor.untyped_storage(), MARK, None)


def is_readable(name: str, tensor: Tensor) -> bool:
    """Return True if Python may read numbers off a tensor: a small integer or boolean one, and no parameter."""
    return (
        not name.startswith("parameter:")
        and not (tensor.is_floating_point() or tensor.is_complex())
        and tensor.untyped_storage().nbytes() <= READABLE_BYTES
    )


def hollow_like(
    tensors: Mapping[str, Tensor], known: Callable[[str, Tensor], bool], made: Made | None = None
) -> dict[str, Tensor]:
    """Return hollow, detached twins of tensors, by name, that share storages as the tensors do; add them to `made`.
    Twins of tensors that are `known` get the tensor's contents, with its name as source."""
    memory: dict[int, torch.UntypedStorage] = {}
    twins = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage._cdata not in memory:
            keep = known(name, tensor) and type(tensor.data) is Tensor and not is_hollow(tensor)
            contents = Contents(keep, frozenset({name}) if keep else frozenset(), TWIN)
            if made is not None:
                made.add(contents)
            memory[storage._cdata] = twin = empty_storage(storage.nbytes(), contents)
            if keep:
                contents.recipe = partial(_of_live, name, int(tensor.storage_offset()))
                twin.copy_(storage)
        twins[name] = on_storage(memory[storage._cdata], tensor.detach())
    return twins


def _of_live(name: str, offset: int, live: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return live[name], offset


def made_again(tensor: Tensor) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
    """Return a function that recomputes a known tensor from live tensors by name; None if there is none."""
    contents = contents_of(tensor)
    recipe = None if contents is None else contents.recipe
    if recipe is None or tensor.is_conj() or tensor.is_neg():
        return None
    shape, stride, start, dtype = tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype

    def made(live: Mapping[str, Tensor]) -> Tensor:
        whole, offset = recipe(live)
        if whole.dtype != dtype:
            raise TypeError(f"{whole.dtype} where {dtype} is expected")
        return whole.as_strided(shape, stride, whole.storage_offset() + start - offset)

    return made


@dataclass(frozen=True, eq=False)
class _Again:
    """Placeholder for a tensor argument, which recomputes the tensor and does not keep it alive."""

    make: Callable[[Mapping[str, Tensor]], Tensor]


def _again(items: Any) -> Any:
    """Replace tensors in arguments by functions that recompute them; return None if one has no such function."""
    makes = [made_again(item) for item in tree_iter(items) if isinstance(item, Tensor)]
    return None if None in makes else tree_map_only(Tensor, lambda each: _Again(made_again(each)), items)  # type: ignore[arg-type]


def _live(items: Any, live: Mapping[str, Tensor]) -> Any:
    return tree_map_only(_Again, lambda each: each.make(live), items)


def recipe_of(func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> Recipe | None:
    """Return a function that recomputes the result of an operator on known tensors; None if there is none."""
    if not isinstance(out, Tensor):
        return None
    given, start = _again((args, kwargs)), int(out.storage_offset())

    def recipe(live: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        args_now, kwargs_now = _live(given, live)
        return func(*args_now, **kwargs_now), start

    return None if given is None else recipe


def recipe_of_written(func: Callable[..., Any], args: Any, kwargs: Any) -> Recipe | None:
    """Return a function that recomputes an operator's first argument, the only one that it writes; None if there is
    none."""
    target, given = args[0], _again((args[1:], kwargs))
    before = contents_of(target)
    old = None if before is None else before.recipe
    if old is None or given is None:
        return None
    shape, stride, start = target.shape, target.stride(), int(target.storage_offset())
    del target  # the closure must not keep it alive

    def recipe(live: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        args_now, kwargs_now = _live(given, live)
        whole, offset = old(live)
        whole = whole.clone(memory_format=torch.preserve_format)
        func(whole.as_strided(shape, stride, start - offset), *args_now, **kwargs_now)
        return whole, offset

    return recipe


def contents_under(tensor: Tensor, new: Contents | None = None) -> Contents:
    """Return the record of a tensor's contents; for a storage that no mode has met, create one, or use `new`."""
    storage = tensor.untyped_storage()
    found = getattr(storage, MARK, None)
    if found is None:
        found = new or Contents(True)
        setattr(storage, MARK, found)
    return found


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy real tensors, by name; copies share storages where the tensors do, and are detached."""
    memory: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        if storage._cdata in memory:
            continue
        if not is_hollow(tensor):
            memory[storage._cdata] = storage.clone()
            continue
        # Contents are made up for a hollow tensor: small positive floats, integer zeros.
        made = torch.zeros(storage.nbytes(), dtype=torch.uint8)
        if tensor.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            made.view(tensor.dtype).uniform_(0.01, 0.05, generator=torch.Generator().manual_seed(0))
        memory[storage._cdata] = made.untyped_storage()
    return {name: on_storage(memory[t.untyped_storage()._cdata], t.detach()) for name, t in tensors.items()}
