"""Memory under hollow tensors (`magis.capture.hollow`), which nobody touches, and what is known of its contents."""

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
    """Knowledge of a storage's bytes; it lies on the storage, and goes with it."""

    known: bool
    sources: frozenset[str] = frozenset()
    """Named tensors on whose contents the known bytes depend."""
    owner: object = None
    """The mode under which the storage was made, or a twin's `TWIN`; no mode writes to what belongs to others."""
    drawn: bool = False
    """True for random numbers, and for bytes made of these and known ones alone."""
    unit: bool = False
    """True for random numbers from [0, 1) as they were drawn."""
    recipe: Recipe | None = None
    """Function that makes them again from the contents of named tensors; None where none is known."""
    meta: torch.UntypedStorage | None = None
    fakes: dict[tuple[Any, ...], FakeTensor] = field(default_factory=dict)


Recipe: TypeAlias = Callable[[Mapping[str, Tensor]], tuple[Tensor, int]]
"""Makes known contents again, of live tensors by name: a tensor on them, and the offset that it had in its storage."""
Made: TypeAlias = "WeakSet[Contents]"  # of what modes have made: what is still alive


def empty_storage(nbytes: int, contents: Contents) -> torch.UntypedStorage:
    """Memory that nobody has touched."""
    storage = untouched(nbytes)
    setattr(storage, MARK, contents)
    return storage


def on_storage(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor that looks like another one, on a storage of its own."""
    with _disable_current_modes():
        made = torch.empty(0, dtype=like.dtype)
        made.set_(storage, int(like.storage_offset()), tuple(like.shape), tuple(like.stride()))
        if like.is_conj():
            made = torch._conj(made)
        return torch._neg_view(made) if like.is_neg() else made


def is_hollow(tensor: Tensor) -> bool:
    """Return True if nothing was ever computed for a tensor."""
    contents = contents_of(tensor)
    return contents is not None and not contents.known


def contents_of(tensor: Tensor) -> Contents | None:
    """Return the knowledge of a tensor's memory; None if no mode has seen it."""
    return getattr(tensor.untyped_storage(), MARK, None)


def is_readable(name: str, tensor: Tensor) -> bool:
    """Return True if Python may read a tensor's numbers: lengths, positions, masks; no weights, no floats."""
    return (
        not name.startswith("parameter:")
        and not (tensor.is_floating_point() or tensor.is_complex())
        and tensor.untyped_storage().nbytes() <= READABLE_BYTES
    )


def hollow_like(
    tensors: Mapping[str, Tensor], known: Callable[[str, Tensor], bool], made: Made | None = None
) -> dict[str, Tensor]:
    """Hollow twins of tensors, by name, that share memory where these do; detached. They are added to `made`.

    Those that are `known` get the contents, whose source is then the name.
    """
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
    """Return a function that makes a known tensor again from live ones by name; None where none is known."""
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
    """In the place of a tensor among arguments, which it does not keep alive."""

    make: Callable[[Mapping[str, Tensor]], Tensor]


def _again(items: Any) -> Any:
    """Arguments with what makes their tensors again; None where that is not known of one."""
    makes = [made_again(item) for item in tree_iter(items) if isinstance(item, Tensor)]
    return None if None in makes else tree_map_only(Tensor, lambda each: _Again(made_again(each)), items)  # type: ignore[arg-type]


def _live(items: Any, live: Mapping[str, Tensor]) -> Any:
    return tree_map_only(_Again, lambda each: each.make(live), items)


def recipe_of(func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> Recipe | None:
    """Return the recipe for the result of an operator on known tensors; None where none is known."""
    if not isinstance(out, Tensor):
        return None
    given, start = _again((args, kwargs)), int(out.storage_offset())

    def recipe(live: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        args_now, kwargs_now = _live(given, live)
        return func(*args_now, **kwargs_now), start

    return None if given is None else recipe


def recipe_of_written(func: Callable[..., Any], args: Any, kwargs: Any) -> Recipe | None:
    """Return the recipe for the memory of an operator's first argument, the only one that it writes."""
    target, given = args[0], _again((args[1:], kwargs))
    before = contents_of(target)
    old = None if before is None else before.recipe
    if old is None or given is None:
        return None
    shape, stride, start = target.shape, target.stride(), int(target.storage_offset())
    del target  # which is not kept alive

    def recipe(live: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        args_now, kwargs_now = _live(given, live)
        whole, offset = old(live)
        whole = whole.clone(memory_format=torch.preserve_format)
        func(whole.as_strided(shape, stride, start - offset), *args_now, **kwargs_now)
        return whole, offset

    return recipe


def contents_under(tensor: Tensor, new: Contents | None = None) -> Contents:
    """Return what is known of a tensor's memory; of memory that no mode has seen everything, or `new`."""
    storage = tensor.untyped_storage()
    found = getattr(storage, MARK, None)
    if found is None:
        found = new or Contents(True)
        setattr(storage, MARK, found)
    return found


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy real tensors, by name; copies share memory where the tensors do, and are detached."""
    memory: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        if storage._cdata not in memory:
            memory[storage._cdata] = _filled(storage, tensor.dtype) if is_hollow(tensor) else storage.clone()
    return {name: on_storage(memory[t.untyped_storage()._cdata], t.detach()) for name, t in tensors.items()}


def _filled(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.UntypedStorage:
    """As much memory with made-up numbers in place of unknown ones: small positive floats, whole numbers 0."""
    made = torch.zeros(storage.nbytes(), dtype=torch.uint8)
    if dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        made.view(dtype).uniform_(0.01, 0.05, generator=torch.Generator().manual_seed(0))
    return made.untyped_storage()
