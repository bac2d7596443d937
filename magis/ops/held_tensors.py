"""Paths from a module or a loss function to what Python holds: `held:module/.blocks/{0/.mask`, `held:loss/(weight`.

The steps of a path: `.name` an attribute, `{key` of a dictionary, `#0` the first value of a dictionary of hooks, `[0`
an item or argument, `(name` a variable of an outer function, `@name` a global. `magis.capture.python_objects` finds
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from magis.errors import CaptureError

PREFIX = "held:"
"""Begins the names of tensors that Python holds beside parameters and buffers; a step looks them up at every run."""
LOST = (AttributeError, KeyError, IndexError, ValueError, TypeError)
"""What is raised where a step leads nowhere."""


def look_up(roots: Mapping[str, object], name: str) -> Tensor:
    """Return the tensor at the end of a path. Raises CaptureError if there is none any more."""
    try:
        item = follow(roots, name.removeprefix(PREFIX))
    except LOST as error:
        raise CaptureError(f"{name} is gone: {error}", hint="keep the tensor where it was, or plan anew") from None
    if not isinstance(item, Tensor):
        raise CaptureError(f"{name} is a {type(item).__name__} by now, no tensor", hint="keep it, or plan anew")
    return item


def holder_of(roots: Mapping[str, object], path: str) -> tuple[Any, str] | None:
    """Return the object that has the attribute at the end of a path, and the attribute's name; None without one."""
    outer, _, step = path.rpartition("/")
    try:
        holder = follow(roots, outer)
    except LOST:
        return None
    return (holder, step[1:]) if step[:1] == "." and step[1:] in getattr(holder, "__dict__", {}) else None


def follow(roots: Mapping[str, object], path: str) -> Any:
    """Return the object at the end of a path; an error of Python's where a step leads nowhere."""
    first, *steps = path.split("/")
    item: Any = roots[first]
    for step in steps:
        item = _FOLLOW[step[:1]](item, step[1:])
    return item


def told(path: str) -> str:
    """Return a path as a person writes it: `model.norm.calls`, `loss closure scale`."""
    text = path
    text = text.removesuffix("/.data")
    for step in ("/._modules/{", "/._parameters/{", "/._buffers/{"):
        text = text.replace(step, ".")
    first, *steps = text.split("/")
    return first + "".join(
        f"[{step[1:]}]" if step[:1] in ("[", "#") else f" closure {step[1:]}" if step[:1] == "(" else f".{step[1:]}"
        for step in steps
    )


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
