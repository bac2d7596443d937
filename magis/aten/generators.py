"""Generators of random numbers that belong to a step itself, beside the default one of its device, by name.

They are found where they are held: attributes of modules ("decoder.noise"), and what a forward or a loss function
refers to from outside ("loss.noise"). The name stands in the graph: it finds the generator in a copy of the module, and
again when a plan is read from a file.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

__all__ = ["held_generators", "own_kept", "same_generator"]

_NAME = re.compile(r"[\w.]+", re.ASCII)
"""Names that the text form of a graph holds."""

DEPTH = 3
"""How deep lists, dictionaries and objects are looked into."""


def held_generators(module: nn.Module, loss_fn: Callable[..., Any] | None = None) -> dict[str, torch.Generator]:
    """The generators of a step by name; one that is held in several places by the first of them."""
    found: dict[str, torch.Generator] = {}
    known = {_identity(torch.default_generator)}
    for name, generator in (*_of_module(module, ""), *_within("loss", loss_fn, DEPTH)):
        if _identity(generator) not in known and _NAME.fullmatch(name):
            known.add(_identity(generator))
            found[name] = generator
    return found


def same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether both are one: calls are handed new objects for the generator that the caller named."""
    return _identity(one) == _identity(other)


@contextmanager
def own_kept(generators: Mapping[str, torch.Generator]) -> Iterator[None]:
    """Leave them as they are found."""
    before = [(each, each.get_state()) for each in generators.values()]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def _identity(generator: Any) -> int:
    return int(generator._cdata)


def _of_module(module: nn.Module, outer: str) -> Iterator[tuple[str, Any]]:
    for path, child in module.named_modules():
        here = ".".join(part for part in (outer, path) if part)
        for key, item in vars(child).items():
            yield from _within(f"{here}.{key}" if here else key, item, DEPTH)
        if not type(child).__module__.startswith("torch."):
            yield from _of_function(f"{here}.forward" if here else "forward", type(child).forward, DEPTH)


def _within(name: str, item: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(item, torch.Generator):
        yield name, item
    elif isinstance(item, (torch.Tensor, str, bytes, int, float, type, type(None))) or depth == 0:
        return
    elif isinstance(item, nn.Module):
        yield from _of_module(item, name) if depth == DEPTH and name == "loss" else ()
    elif isinstance(item, dict):
        for key, each in item.items():
            yield from _within(f"{name}.{key}", each, depth - 1)
    elif isinstance(item, (list, tuple)):
        for number, each in enumerate(item):
            yield from _within(f"{name}.{number}", each, depth - 1)
    elif isinstance(item, functools.partial):
        for key, each in {"function": item.func, "arguments": item.args, **item.keywords}.items():
            yield from _within(f"{name}.{key}", each, depth - 1)
    elif inspect.ismethod(item):
        yield from _within(f"{name}.self", vars(item.__self__) if hasattr(item.__self__, "__dict__") else None, depth)
        yield from _of_function(name, item.__func__, depth)
    elif inspect.isfunction(item):
        yield from _of_function(name, item, depth)


def _of_function(name: str, function: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """What a function refers to: variables of functions around it, global ones, and defaults."""
    if not inspect.isfunction(function):
        return
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    around: dict[str, Any] = {}
    for key, cell in zip(names, cells, strict=True):
        with suppress(ValueError):  # not filled yet
            around[key] = cell.cell_contents
    beyond = {key: function.__globals__[key] for key in function.__code__.co_names if key in function.__globals__}
    defaults = {"defaults": function.__defaults__ or (), **(function.__kwdefaults__ or {})}
    for key, item in {**defaults, **beyond, **around}.items():
        yield from _within(f"{name}.{key}", item, depth - 1)
