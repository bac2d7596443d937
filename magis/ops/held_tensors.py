"""Tensors that Python holds beside parameters and buffers: plain attributes, lists of them, closures, a loss's weights.

Each gets a path from the module or the loss function to it, so that a step reads at every run what eager would read
then: `held:module/.blocks/{0/.mask` or `held:loss/(weight`.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from magis.errors import CaptureError

PREFIX = "held:"
MOST = 50_000
"""Objects that are looked through."""
_CONTAINERS = (dict, list, tuple, set, deque)


def find(roots: Mapping[str, object], tensor: Tensor) -> str | None:
    """The name of the shortest path from one of `roots` to a tensor with this memory and these looks, if any."""
    looks = _looks(tensor)
    waiting = deque((name, root) for name, root in roots.items())
    seen: set[int] = set()
    while waiting and len(seen) < MOST:
        path, item = waiting.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.layout == tensor.layout and _looks(item) == looks:
                return PREFIX + path
            continue
        waiting.extend((f"{path}/{step}", part) for step, part in _parts(item) if _is_plain(step))
    return None


def look_up(roots: Mapping[str, object], name: str) -> Tensor:
    """What a path of `find` leads to now. Raises CaptureError if that is no tensor any more."""
    first, *steps = name.removeprefix(PREFIX).split("/")
    item: Any = roots[first]
    try:
        for step in steps:
            item = _FOLLOW[step[0]](item, step[1:])
    except (AttributeError, KeyError, IndexError, ValueError, TypeError) as error:
        raise CaptureError(f"{name} is gone: {error}", hint="keep the tensor where it was, or plan anew") from None
    if not isinstance(item, Tensor):
        raise CaptureError(f"{name} is a {type(item).__name__} by now, no tensor", hint="keep it, or plan anew")
    return item


def _looks(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _is_plain(step: str) -> bool:
    return "/" not in step and not any(mark.isspace() for mark in step)


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by the step that leads there."""
    if isinstance(item, OrderedDict) and all(isinstance(key, int) for key in item):
        # Hooks: their keys count all hooks of the process, so that a second build of a module has others.
        yield from ((f"#{index}", value) for index, value in enumerate(item.values()))
    elif isinstance(item, dict):
        yield from ((f"{{{key}", value) for key, value in item.items() if isinstance(key, (str, int)))
    elif isinstance(item, (list, tuple, deque)):
        yield from ((f"[{index}", value) for index, value in enumerate(item))
    elif isinstance(item, partial):
        yield from (("[0", item.func), ("[1", item.args), ("[2", item.keywords))
    elif isinstance(item, types.MethodType):
        yield from ((".__self__", item.__self__), (".__func__", item.__func__))
    elif isinstance(item, types.FunctionType):
        yield from _of_function(item)
    elif isinstance(item, nn.Module) or _is_of_user(type(item)):
        yield from ((f".{name}", value) for name, value in getattr(item, "__dict__", {}).items())
        for name in ("forward", "__call__"):
            method = getattr(type(item), name, None)
            if isinstance(method, types.FunctionType) and _is_of_user(type(item)):
                yield f".{name}", types.MethodType(method, item)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"({name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield ".__defaults__", function.__defaults__ or ()
    yield ".__kwdefaults__", function.__kwdefaults__ or {}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (Tensor, nn.Module, *_CONTAINERS, types.FunctionType)) or _is_of_user(type(value)):
            yield f"@{name}", value


def _is_of_user(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "types", "numpy", "_io", "magis", "re")


def _cell(item: Any, name: str) -> Any:
    return item.__closure__[item.__code__.co_freevars.index(name)].cell_contents


def _key(item: Any, name: str) -> Any:
    return item[name] if name in item else item[int(name)]


def _at(item: Any, index: str) -> Any:
    return (item.func, item.args, item.keywords)[int(index)] if isinstance(item, partial) else item[int(index)]


_FOLLOW: dict[str, Callable[[Any, str], Any]] = {
    ".": getattr,
    "{": _key,
    "#": lambda item, index: list(item.values())[int(index)],
    "[": _at,
    "(": _cell,
    "@": lambda item, name: item.__globals__[name],
}
