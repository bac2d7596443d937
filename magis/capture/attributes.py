"""Python attributes of a module while its forward runs on stand-ins: what it leaves there is taken away again."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["attributes_kept", "changed"]

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
            for name, copy in contents.items():
                _refill(before[name], copy)


def changed(kept: Kept) -> tuple[str, ...]:
    """Names of the attributes that are others by now, or hold others."""
    return tuple(
        f"{path}.{name}".lstrip(".")
        for path, part, before, contents in kept
        for name in sorted({*before, *vars(part)})
        if before.get(name, kept) is not vars(part).get(name, kept) or not _same(before[name], contents[name])
    )


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, OrderedDict, set, deque) else None


def _same(value: Any, copy: Any) -> bool:
    if copy is None:
        return True
    pairs = (
        zip(value.items(), copy.items(), strict=False) if isinstance(value, dict) else zip(value, copy, strict=False)
    )
    if isinstance(value, dict):
        return len(value) == len(copy) and all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
    return len(value) == len(copy) and all(a is b for a, b in pairs)


def _refill(value: Any, copy: Any) -> None:
    if copy is None or _same(value, copy):
        return
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(copy)
    else:
        value.extend(copy)
