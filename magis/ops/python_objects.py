"""Walk over the Python objects that a step's code can reach, and the paths that find them again.

A path (`held:module/.blocks/{0/.mask`, `held:loss/(weight`) has steps: `.name` an attribute, `{key` of a dictionary,
`#0` the first value of a dictionary of hooks, `[0` an item, `(name` a closure variable, `@name` a global.
`magis.capture.snapshot` watches and restores the objects, `find` names tensors. Objects whose contents Python cannot
inspect are opaque.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
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

from magis.errors import CaptureError

PREFIX = "held:"
"""Prefix of the names of tensors that Python holds besides parameters and buffers; each step looks them up by path."""
DATA = ".data"
"""Last step of the path to a parameter whose data are replaced: `weight.data = ...`."""
PLAIN = frozenset({
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
})  # fmt: skip
LEAVES = (
    logging.Logger, torch.Generator, types.CodeType, types.MethodWrapperType, types.WrapperDescriptorType, re.Pattern,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.GenericAlias, types.UnionType, type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
"""Types that cannot change a step's behaviour, are immutable, or (generators of torch) are in the graph."""
_PYTHONS = getattr(random.random, "__self__", None)  # Python's global generator
CONTAINERS = (dict, list, set, deque)
MANY, MOST_HOLDERS, MOST_BYTES = 100_000, 100_000, 1 << 20
"""Limits of watching: items of a container, number of objects, bytes of an array."""
CACHE = type(functools.lru_cache(lambda: None))
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
ASKED = (ContextVar, CACHE, types.MappingProxyType, functools.partial, BaseException)
"""Types that are watched by their contents, read again at each check."""
GETTERS = (operator.attrgetter, operator.methodcaller)
MISSING = object()
_LOST = (AttributeError, KeyError, IndexError, ValueError, TypeError)
SYSTEM = frozenset({"torch", "numpy", "builtins", *sys.stdlib_module_names})
_OF_BLOCK_MASKS = "torch.nn.attention.flex_attention"
_SPECIAL = frozenset({"forward", "__call__", "_call_impl", "__getattr__", "__getattribute__"})
SAVING = frozenset(
    {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    | {"_non_persistent_buffers_set"}
)
"""Attributes of modules that do not affect their forward."""


def parts(item: Any, names: frozenset[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (step of the path, object) for each object that an object holds; of attributes only those in `names`."""
    yield from next((steps(item) for kind, steps in _PARTS if isinstance(item, kind)), ())
    if type(item) in (*CONTAINERS, tuple, frozenset) or isinstance(item, (type, Optimizer)):
        return
    made_anew = isinstance(item, contextlib._GeneratorContextManagerBase)  # as a decorator, for each call
    for name, value in (attributes(item) or {}).items():
        if (names is None or name in names) and name not in SAVING and not (made_anew and name == "gen"):
            yield f".{name}", value
    yield from _attributes(item, *slots(type(item)))  # type: ignore[arg-type]  # a class is hashable


def attributes(item: Any) -> dict[str, Any] | None:
    """Return an object's `__dict__`; None without one."""
    try:
        held = item.__dict__
    except Exception:  # noqa: BLE001 (it may be the user's own code that raises)
        return None
    return held if isinstance(held, dict) else None


def is_opaque(item: Any) -> bool:
    """Return True if an object's own `__getattribute__` hides even its class."""
    try:
        return not isinstance(item.__class__, type)
    except Exception:  # noqa: BLE001 (it is the user's own code that raises)
        return True


def _of_mapping(item: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(item, OrderedDict) and item and all(isinstance(key, int) for key in item):
        # Hooks: their keys are process-wide counters, so they differ in a second instance of a module.
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
    # Hyperparameters only; parameters and state are tensors of the step.
    return _numbered({key: value for key, value in each.items() if key != "params"} for each in item.param_groups)


def scheduled(item: Optimizer) -> tuple[Any, ...]:
    """Return the hyperparameters in an optimizer's groups, such as learning rates."""
    return tuple(each for _, group in _of_optimizer(item) for each in group.values())


def _attributes(item: Any, *names: str) -> Iterator[tuple[str, Any]]:
    return ((f".{name}", _attribute(item, name)) for name in names)


def _attribute(item: Any, name: str) -> Any:
    try:
        return getattr(item, name, MISSING)
    except _LOST:  # may come from a user's `__getattr__`
        return MISSING


_PARTS: tuple[tuple[Any, Callable[[Any], Iterator[tuple[str, Any]]]], ...] = (
    ((dict, types.MappingProxyType), _of_mapping),
    ((list, tuple, deque, set, frozenset), _numbered),
    (functools.partial, lambda item: _attributes(item, "func", "args", "keywords")),
    (VIEWS, lambda item: _attributes(item, "mapping")),
    (BaseException, lambda item: _attributes(item, "args", "__cause__", "__context__")),
    (types.MethodType, lambda item: _attributes(item, "__self__", "__func__")),
    (types.BuiltinFunctionType, lambda item: _attributes(item, "__self__")),
    (types.FunctionType, _of_function),
    ((property, classmethod, staticmethod), lambda item: _attributes(item, "fget", "__func__")),
    (weakref.ref, lambda item: iter([("()", item())])),
    (ContextVar, lambda item: iter([("()", item.get(None))])),
    (CACHE, lambda item: iter([*_attributes(item, "__wrapped__"), *(("()", value) for value in cached(item))])),
    (Optimizer, _of_optimizer),
)


def walk(roots: Mapping[str, object], further: Callable[[Any], Iterable[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for each object reachable from `roots` by `further`, once, with its shortest path."""
    waiting, seen = deque(roots.items()), dict[int, object]()  # keeps objects alive, so that no id is reused
    while waiting and len(seen) < MOST_HOLDERS:
        path, item = waiting.popleft()
        if id(item) not in seen and not is_opaque(item):
            seen[id(item)] = item
            yield path, item
            for step, part in further(item):
                if type(part) not in PLAIN and step != "()" and "/" not in step and len(step.split()) == 1:
                    waiting.append((f"{path}/{step}", part))


def lasting(item: Any) -> list[tuple[str, Any]]:
    """Return (step of the path, object) for all that a path can reach from `item`: items, attributes, closure
    variables, globals of functions, and methods of a user's objects."""
    if isinstance(item, Tensor) or (isinstance(item, CONTAINERS) and not item):
        return []
    of_user, further = is_of_user(type(item)), list[tuple[str, Any]]()
    if (
        of_user
        or type(item).__module__ == _OF_BLOCK_MASKS
        or isinstance(item, (*CONTAINERS, tuple, nn.Module, types.FunctionType, types.MethodType))
    ):
        further += parts(item)
    if isinstance(item, types.FunctionType) and package(item) != "torch":
        for name in item.__code__.co_names:
            value = item.__globals__.get(name)
            theirs = is_of_user(value if isinstance(value, type) else type(value))
            if theirs or isinstance(value, (Tensor, nn.Module, *CONTAINERS, tuple, types.FunctionType)):
                further.append((f"@{name}", value))
    elif isinstance(item, type):
        further += [(f".{name}", value) for name, value in vars(item).items() if not name.startswith("__")]
    elif of_user:
        methods = ((name, getattr(type(item), name, None)) for name in ("forward", "__call__"))
        functions = ((name, each) for name, each in methods if isinstance(each, types.FunctionType))
        further += [(f".{name}", types.MethodType(each, item)) for name, each in functions]
    return further


def find(roots: Mapping[str, object], tensor: Tensor) -> str | None:
    """Return the shortest path from `roots` to a tensor with this memory and layout; None without one."""
    looks = _layout_in_memory(tensor)
    for path, item in walk(roots, lasting):
        if isinstance(item, Tensor) and item.layout == tensor.layout and _layout_in_memory(item) == looks:
            return PREFIX + path
    return None


def _layout_in_memory(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def package(of: object) -> str:
    """Return the top-level package of a class, function or module's name; `builtins` for Cython's own metaclass, which
    keeps no name."""
    name = of if isinstance(of, str) else getattr(of, "__module__", None)
    return "builtins" if isinstance(name, types.GetSetDescriptorType) else str(name).partition(".")[0]


def is_of_user(kind: type | types.FunctionType) -> bool:
    """Return True for a class or function that is not of torch, numpy, Python itself or magis."""
    return package(kind) not in ("torch", "builtins", "types", "numpy", "_io", "magis", "re")


def is_of_system(of: object) -> bool:
    """Return True if a class, function or module's name is of torch, numpy or the standard library."""
    return package(of) in SYSTEM


def same(now: Any, then: Any) -> bool:
    """Return True if both are one object, or plain values that are equal bit for bit."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, tuple):
        return len(now) == len(then) and (not any(map(operator.is_not, now, then)) or all(map(same, now, then)))
    if type(now) in PLAIN:
        return bool(now == then) and repr(now) == repr(then)  # 0.0 and -0.0 differ
    if isinstance(now, types.MethodType):
        return now.__self__ is then.__self__ and now.__func__ is then.__func__
    return False


@functools.lru_cache(maxsize=4096)
def slots(kind: type) -> tuple[str, ...]:
    """Return the `__slots__` of a class and its bases, dunder names excluded."""
    names = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    flat = [name for some in names for name in ((some,) if isinstance(some, str) else some)]
    return tuple(name for name in flat if not name.startswith("__"))


def slot_values(item: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values of an object's slots; MISSING for unset ones."""
    return tuple([_attribute(item, name) for name in names])


def names_of_class(kind: type, names: frozenset[str] | None) -> tuple[str, ...]:
    """Return the attributes of a class that can affect a step: those in `names`, and implicitly called methods."""
    ours = not is_of_system(kind)
    return tuple(
        key for key, value in vars(kind).items()
        if type(value) is not types.MemberDescriptorType  # isinstance may raise
        and (key in _SPECIAL or (ours and is_called(key, value)) or (names is None and key[:2] != "__")
             or (names is not None and key in names and (ours or key[:2] != "__")))
    )  # fmt: skip


def is_called(key: str, value: object) -> bool:
    """Return True for a dunder method that Python calls implicitly."""
    return key[:2] == "__" and callable(value) and key not in _SPECIAL


def order_of_class(kind: type, names: frozenset[str] | None, keys: tuple[str, ...], count: int) -> tuple[Any, ...]:
    """Return the method resolution order of a class, and attributes added since, which may hide those of bases."""
    if len(vars(kind)) == count:
        return (kind.__mro__,)
    return (kind.__mro__, *sorted({*names_of_class(kind, names)} - {*keys}))


def function_state(item: types.FunctionType) -> tuple[Any, ...]:
    """Return a function's code, defaults and closure contents."""
    cells = tuple(map(cell_content, item.__closure__ or ()))
    return (item.__code__, item.__defaults__, item.__kwdefaults__, *cells)


def cell_content(cell: types.CellType) -> Any:
    """Return the value of a closure cell; MISSING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


def cached(cache: Any) -> list[Any]:
    """Return the results and arguments that a `functools` cache holds."""
    held = gc.get_referents(cache)  # results and arguments of a bounded cache, else its dictionary
    held += [part for item in held if type(item) is dict for pair in item.items() for part in pair]
    links = "_lru_list_elem"
    return [item for item in held if type(item) not in (dict, type) and type(item).__name__ != links]


@functools.lru_cache(maxsize=4096)
def codes_within(code: types.CodeType) -> frozenset[types.CodeType]:
    """Return a code object and the code objects of all functions that it defines."""
    inner = (codes_within(item) for item in code.co_consts if isinstance(item, types.CodeType))
    return frozenset((code,)).union(*inner)


def hidden_state(item: Any) -> tuple[Callable[[], Any] | None, Callable[[Any], None] | None] | None:
    """Return functions (read, restore) for an object's hidden state: random state, arrays, counters. Returns None
    without such state; a function is None if that is impossible."""
    if isinstance(item, torch.jit.RecursiveScriptModule):  # type: ignore[attr-defined]  # its attributes are in C++
        names = sorted(item._concrete_type.get_attributes())
        values = functools.partial(map, item._c.getattr, names)
        return lambda: repr([None if isinstance(value, Tensor) else value for value in values()]), None
    numpy = sys.modules.get("numpy")
    if item is _PYTHONS or (numpy is not None and item is numpy.random.mtrand._rand):
        return None  # watched by `HostGenerators`
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
            return lambda: (item.shape, str(item.dtype), item.tobytes()), None
    if hasattr(type(item), "__next__") and is_of_system(type(item)) and attributes(item) is None:
        counts = isinstance(item, (itertools.count, itertools.repeat)) or hasattr(type(item), "__length_hint__")
        return (lambda: (repr(item), operator.length_hint(item, -1)), None) if counts else (None, None)
    written = isinstance(item, io.IOBase) and not item.closed and not item.readable()  # a log
    if written or isinstance(item, (int, float, complex, str, bytes)):
        return None
    try:
        if memoryview(item).nbytes <= MOST_BYTES:
            return lambda: memoryview(item).tobytes(), None
    except (TypeError, BufferError):  # no buffer protocol
        kind = type(item)
        plain = attributes(item) is not None or any("__slots__" in vars(each) for each in kind.__mro__)
        streams = isinstance(item, (types.GeneratorType, types.CoroutineType, io.IOBase))
        if not streams and (plain or is_of_system(kind)):
            return None
    return None, None


def look_up(roots: Mapping[str, object], name: str) -> Tensor:
    """Return the tensor at the end of a path. Raises CaptureError if the path no longer leads to a tensor."""
    try:
        item = follow(roots, name.removeprefix(PREFIX))
    except _LOST as error:
        raise CaptureError(f"{name} is gone: {error}", hint="keep the tensor where it was, or plan anew") from None
    if not isinstance(item, Tensor):
        raise CaptureError(f"{name} is a {type(item).__name__} by now, no tensor", hint="keep it, or plan anew")
    return item


def holder_of(roots: Mapping[str, object], path: str) -> tuple[Any, str] | None:
    """Return the owner of the attribute at the end of a path, and the attribute's name; None if it is none."""
    outer, _, step = path.rpartition("/")
    holder = found_at(roots, outer)
    return (holder, step[1:]) if step[:1] == "." and hasattr(holder, "__dict__") else None


def is_of_module(roots: Mapping[str, object], path: str) -> bool:
    """Return True if a path leads to an attribute or a buffer of a module."""
    outer, _, step = path.rpartition("/")
    outer = outer.removesuffix("/._buffers") if step[:1] == "{" else outer
    return (step[:1] == "." or "/._buffers/{" in path) and isinstance(found_at(roots, outer), nn.Module)


def leave(roots: Mapping[str, object], path: str, left: Any) -> None:
    """Store a tensor or a number at the end of a path, as the forward did."""
    outer, _, step = path.rpartition("/")
    holder = follow(roots, outer)
    if isinstance(holder, Tensor):
        holder.data = left
    else:
        (holder if isinstance(holder, dict) else vars(holder))[step[1:]] = left


def found_at(roots: Mapping[str, object], path: str) -> object:
    """Return the object at the end of a path; None if the path leads nowhere."""
    try:
        return follow(roots, path)
    except _LOST:
        return None


def follow(roots: Mapping[str, object], path: str) -> Any:
    """Return the object at the end of a path; AttributeError, KeyError, IndexError ... if the path leads nowhere."""
    first, *steps = path.split("/")
    item: Any = roots[first]
    for step in steps:
        item = _FOLLOW[step[:1]](item, step[1:])
    return item


def told(path: str) -> str:
    """Return a path in readable form: `model.norm.calls`, `loss closure scale`."""
    text = path.removesuffix(f"/{DATA}")
    for step in ("/._modules/{", "/._parameters/{", "/._buffers/{"):
        text = text.replace(step, ".")
    first, *steps = text.split("/")
    return first + "".join(
        f"[{step[1:]}]" if step[:1] in ("[", "#") else f" closure {step[1:]}" if step[:1] == "(" else f".{step[1:]}"
        for step in steps
    )


_FOLLOW: dict[str, Callable[[Any, str], Any]] = {
    ".": getattr,
    "{": lambda item, name: item[name] if name in item else item[int(name)],
    "#": lambda item, index: list(item.values())[int(index)],
    "[": lambda item, index: item[int(index)],
    "(": lambda item, name: item.__closure__[item.__code__.co_freevars.index(name)].cell_contents,
    "@": lambda item, name: item.__globals__[name],
}
