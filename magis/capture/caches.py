"""Tensors that `functools.lru_cache` keeps: tables and embeddings of positions, made in a module's first step.

What a capture leaves there would be taken for real by the next call, so it is forgotten. What real calls have left
there is part of the step: its contents are those of the call's arguments, and stay as they are.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from magis.capture.hollow import is_made

__all__ = ["CACHED", "CACHES", "cached_memory", "caches_kept", "forget_made"]

CACHED = "cached:"
"""Begins the names of such tensors in a graph."""
CACHES = "the caches of functools"
_KIND = type(functools.lru_cache(lambda: None))


@contextmanager
def caches_kept() -> Iterator[Callable[[], bool]]:
    """Forget at the end, or when what is yielded is called, what the block leaves in caches without computing it."""
    done: list[bool] = []

    def forget() -> bool:
        done.append(forget_made())
        return done[-1]

    try:
        yield forget
    finally:
        if not done:
            forget_made()


def forget_made() -> bool:
    """Empty the caches that hold tensors of a capture; whether there are some."""
    found = False
    for cache, tensors in _caches():
        if any(map(is_made, tensors)):
            cache.cache_clear()
            found = True
    return found


def cached_memory() -> set[int]:
    """Storages of all tensors in caches."""
    return {tensor.untyped_storage()._cdata for _, tensors in _caches() for tensor in tensors}


def _objects_of(kind: type) -> list[Any]:
    """All that Python keeps track of, those included that collections are told to pass over."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    found = [item for item in gc.get_objects() if type(item) is kind]
    if frozen:
        gc.freeze()
    return found


def _caches() -> Iterator[tuple[Any, list[Tensor]]]:
    for cache in _objects_of(_KIND):
        if not cache.cache_info().currsize:
            continue
        held = gc.get_referents(cache)
        held += [value for item in held if type(item) is dict for value in item.values()]
        tensors = [
            part
            for item in held
            if isinstance(item, (Tensor, tuple, list))
            for part in tree_iter(item)
            if isinstance(part, Tensor) and part.layout is torch.strided
        ]
        if tensors:
            yield cache, tensors
