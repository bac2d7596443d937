"""The Python objects that a step's code can reach by a name: one walker that finds them, step by step.

`Snapshot` (snapshot.py) watches and restores what it finds, `find` names tensors by the path to them. The world is
closed: an object whose contents nobody can see is opaque.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import operator
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.ops.held_tensors import PREFIX

PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, slice}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
LEAVES = (
    logging.Logger, torch.Generator, types.CodeType, types.MethodWrapperType, types.WrapperDescriptorType, re.Pattern,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.GenericAlias, types.UnionType, type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
"""Objects that decide nothing, never change, or (generators of torch) stand in the graph."""
_PYTHONS = getattr(random.random, "__self__", None)
"""Python's global generator."""
CONTAINERS = (dict, list, set, deque)
MANY, MOST_HOLDERS, MOST_BYTES = 100_000, 100_000, 1 << 20
"""Longer containers, further objects and larger arrays are not watched."""
CACHE = type(functools.lru_cache(lambda: None))
GETTERS = (operator.attrgetter, operator.methodcaller)
MISSING = object()
SYSTEM = frozenset({"torch", "numpy", "builtins", *sys.stdlib_module_names})
SAVING = frozenset(
    {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    | {"_non_persistent_buffers_set"}
)
"""Attributes of modules that have nothing to do with their forward."""


def parts(item: Any, names: frozenset[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object holds, each with the step that leads there (`magis.ops.held_tensors`).

    Of attributes those in `names` (None: all).
    """
    yield from next((steps(item) for kind, steps in _PARTS if isinstance(item, kind)), ())
    if type(item) in (*CONTAINERS, tuple, frozenset) or isinstance(item, (type, Optimizer)):
        return
    for name, value in attributes(item).items():
        if (names is None or name in names) and name not in SAVING:
            yield f".{name}", value
    for name, value in zip(slots(item), slot_values(item, slots(item)), strict=True):
        yield f".{name}", value


def _of_mapping(item: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(item, OrderedDict) and item and all(isinstance(key, int) for key in item):
        # Hooks: their keys count all hooks of the process, so that a second build of a module has others.
        return ((f"#{index}", value) for index, value in enumerate(item.values()))
    return ((f"{{{key}" if isinstance(key, (str, int)) else f"{{{key!r}", item[key]) for key in [*item])


def _numbered(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"[{index}", value) for index, value in enumerate(items))


def _of_function(item: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
        yield f"({name}", cell_content(cell)
    yield ".__defaults__", item.__defaults__ or ()
    yield ".__kwdefaults__", item.__kwdefaults__ or {}


def _of_optimizer(item: Optimizer) -> Iterator[tuple[str, Any]]:
    # A schedule may be read; parameters and state are tensors of a step.
    return _numbered({key: value for key, value in each.items() if key != "params"} for each in item.param_groups)


def scheduled(item: Optimizer) -> tuple[Any, ...]:
    """Return the settings of an optimizer's groups: learning rates, say."""
    return tuple(each for _, group in _of_optimizer(item) for each in group.values())


def _named(item: Any, *names: str) -> Iterator[tuple[str, Any]]:
    return ((f".{name}", getattr(item, name, None)) for name in names)


_PARTS: tuple[tuple[Any, Callable[[Any], Iterator[tuple[str, Any]]]], ...] = (
    ((dict, types.MappingProxyType), _of_mapping),
    ((list, tuple, deque, set, frozenset), _numbered),
    (functools.partial, lambda item: _numbered((item.func, item.args, item.keywords))),
    (types.MethodType, lambda item: _named(item, "__self__", "__func__")),
    (types.BuiltinFunctionType, lambda item: _named(item, "__self__")),
    (types.FunctionType, _of_function),
    ((property, classmethod, staticmethod), lambda item: _named(item, "fget", "__func__")),
    (weakref.ref, lambda item: iter([("()", item())])),
    (ContextVar, lambda item: iter([("()", item.get(None))])),
    (CACHE, lambda item: iter([*_named(item, "__wrapped__"), *_numbered(cached(item))])),
    (Optimizer, _of_optimizer),
)


def find(roots: Mapping[str, object], tensor: Tensor) -> str | None:
    """Name the shortest path from one of `roots` to a tensor with this memory and layout; None without one."""
    looks = _memory(tensor)
    waiting = deque((name, root) for name, root in roots.items())
    seen: set[int] = set()
    while waiting and len(seen) < MOST_HOLDERS:
        path, item = waiting.popleft()
        if id(item) in seen or type(item) in PLAIN:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.layout == tensor.layout and _memory(item) == looks:
                return PREFIX + path
            continue
        further = parts(item) if isinstance(item, (*CONTAINERS, tuple, nn.Module)) or _is_of_user(type(item)) else ()
        waiting.extend((f"{path}/{step}", part) for step, part in (*further, *_reached(item)) if _is_plain(step))
    return None


def _reached(item: Any) -> Iterator[tuple[str, Any]]:
    """Methods of a user's object, and globals of a function, in which tensors may lie."""
    if isinstance(item, types.FunctionType):
        yield from parts(item)
        for name in item.__code__.co_names:
            value = item.__globals__.get(name)
            of_user = _is_of_user(value if isinstance(value, type) else type(value))
            if of_user or isinstance(value, (Tensor, nn.Module, *CONTAINERS, tuple, types.FunctionType)):
                yield f"@{name}", value
    elif isinstance(item, (functools.partial, types.MethodType)):
        yield from parts(item)
    elif isinstance(item, type):
        yield from ((f".{name}", value) for name, value in vars(item).items() if not name.startswith("__"))
    elif _is_of_user(type(item)):
        for name in ("forward", "__call__"):
            method = getattr(type(item), name, None)
            if isinstance(method, types.FunctionType):
                yield f".{name}", types.MethodType(method, item)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _is_plain(step: str) -> bool:
    return "/" not in step and not any(mark.isspace() for mark in step)


def _is_of_user(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "types", "numpy", "_io", "magis", "re")


def is_of_torch(name: str | None) -> bool:
    """Whether a module of this name is part of torch."""
    return bool(name) and str(name).partition(".")[0] == "torch"


def is_of_system(name: str) -> bool:
    """Whether a module of this name is part of torch, numpy or Python itself."""
    return name.partition(".")[0] in SYSTEM


def same(now: Any, then: Any) -> bool:
    """Whether two plain values are equal, or two objects one."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if type(now) in PLAIN:
        return bool(now == then) and repr(now) == repr(then)  # 0.0 and -0.0 are two numbers
    if isinstance(now, tuple):
        return len(now) == len(then) and all(map(same, now, then))
    if isinstance(now, types.MethodType):
        return now.__self__ is then.__self__ and now.__func__ is then.__func__
    return False


def attributes(item: Any) -> dict[str, Any]:
    """Return the dictionary of an object's attributes; an empty one of its own for an object that has none."""
    found = getattr(item, "__dict__", None)
    return found if isinstance(found, dict) else {}


def slots(item: Any) -> tuple[str, ...]:
    """Return the names of an object's slots."""
    return _slots_of(type(item))  # type: ignore[arg-type]  # a class is hashable


@functools.lru_cache(maxsize=4096)
def _slots_of(kind: type) -> tuple[str, ...]:
    names = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    flat = [name for some in names for name in ((some,) if isinstance(some, str) else some)]
    return tuple(name for name in flat if not name.startswith("__"))


def slot_values(item: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values of slots; MISSING for empty ones."""
    return tuple(getattr(item, name, MISSING) for name in names)


def function_state(item: types.FunctionType) -> tuple[Any, ...]:
    """Return what a function runs: its code, defaults and cells."""
    cells = tuple(map(cell_content, item.__closure__ or ()))
    return (item.__code__, item.__defaults__, item.__kwdefaults__, *cells)


def cell_content(cell: types.CellType) -> Any:
    """Return the value of a closure's variable; MISSING before it has one."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


def cached(cache: Any) -> list[Any]:
    """Return what a cache of `functools` holds, and its arguments."""
    held = gc.get_referents(cache)
    held += [value for item in held if type(item) is dict for value in item.values()]
    links = [item for item in held if type(item).__name__ == "_lru_list_elem"]
    return [item for item in (*held, *gc.get_referents(*links)) if item is not cache and type(item) not in (dict, type)]


def names_of_getter(item: Any) -> set[str]:
    """Return the names that an `operator.attrgetter` or `methodcaller` looks up."""
    _, arguments = item.__reduce__()[:2]
    return {part for each in arguments if isinstance(each, str) for part in each.split(".")}


def hidden_state(item: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return how to read and put back what an object keeps out of Python's sight: random numbers, arrays, counters."""
    numpy = sys.modules.get("numpy")
    if item is _PYTHONS or (numpy is not None and item is numpy.random.mtrand._rand):
        return None  # whose draws are looked at by themselves
    if isinstance(item, random.Random):
        return item.getstate, item.setstate
    if numpy is not None:
        if isinstance(item, numpy.random.Generator):
            state = copy.deepcopy(item.bit_generator.state)
            return lambda: repr(item.bit_generator.state), lambda _: setattr(item.bit_generator, "state", state)
        if isinstance(item, numpy.random.RandomState):
            kept = item.get_state()
            return lambda: repr(item.get_state()), lambda _: item.set_state(kept)
        if isinstance(item, numpy.ndarray) and item.nbytes <= MOST_BYTES:
            return lambda: (item.shape, str(item.dtype), item.tobytes()), _left
    if hasattr(item, "__length_hint__") or type(item).__module__ == "itertools":
        return lambda: (repr(item), operator.length_hint(item, -1)), _left
    try:
        memory = memoryview(item)
    except (TypeError, BufferError):
        return None
    return (lambda: memoryview(item).tobytes(), _left) if memory.nbytes <= MOST_BYTES else None


def _left(_state: object) -> None:
    """Leave what cannot be put back."""


def is_opaque(item: Any) -> bool:
    """Whether an object without attributes may hold what nobody can watch: files, generators, objects of extensions."""
    if isinstance(item, (types.GeneratorType, types.CoroutineType, io.IOBase)):
        return True
    if isinstance(item, (int, float, complex, str, bytes)):
        return False
    try:
        return memoryview(item).nbytes > MOST_BYTES
    except (TypeError, BufferError):
        kind = type(item)
        plain = hasattr(item, "__dict__") or any("__slots__" in vars(each) for each in kind.__mro__)
        return not plain and not is_of_system(kind.__module__)
