"""Python attributes of a module while its forward runs on stand-ins: what it leaves there is taken away again."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["attributes_kept", "changed", "tensors_left"]

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
"""Hooks are in an OrderedDict."""
Kept = list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]
"""Path, part, its attributes, and copies of those that are containers."""


@contextmanager
def attributes_kept(*roots: object) -> Iterator[Kept]:
    """Put every attribute of the modules among `roots` back at the end, and what lists and dictionaries held."""
    kept = [
        (path, part, dict(vars(part)), {name: _copied(value) for name, value in vars(part).items()})
        for root in roots
        if isinstance(root, nn.Module)
        for path, part in root.named_modules()
    ]
    try:
        yield kept
    finally:
        for _, part, before, contents in kept:
            vars(part).clear()
            vars(part).update(before)
            for name, held in contents.items():
                _refill(before[name], held)


def changed(kept: Kept) -> tuple[str, ...]:
    """Names of the attributes that are others by now, or hold others."""
    return tuple(
        f"{path}.{name}".lstrip(".")
        for path, part, before, contents in kept
        for name in sorted({*before, *vars(part)})
        if before.get(name, kept) is not vars(part).get(name, kept) or not _same(before[name], contents[name])
    )


def tensors_left(kept: Kept) -> dict[str, Tensor]:
    """Tensors that are attributes by now where other values were, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part, before, _ in kept
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and value is not before.get(name)
    }


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else None


def _same(value: Any, before: Any) -> bool:
    if before is None:
        return True
    if isinstance(value, dict):
        pairs = zip(value.items(), before.items(), strict=False)
        return len(value) == len(before) and all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
    return len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=False))


def _refill(value: Any, before: Any) -> None:
    if before is None or _same(value, before):
        return
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(before)
    else:
        value.extend(before)
