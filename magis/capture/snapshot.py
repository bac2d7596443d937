"""What Python objects hold: remembered by identity, compared again in about a microsecond an object, and put back.

A captured step has what its forward read off Python objects (a dropout's `p`, hooks, a function's cells) as constants.
A snapshot of a module and its loss says whether they are what they were. It follows attributes, containers, closures,
partials and classes; it stops at tensors, of which it keeps the looks, at optimizers, loggers and Python's modules.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_not, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

COUNTERS = (RemovableHandle,)
"""Classes of torch that count what they make."""
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
LEAVES = (Tensor, Optimizer, logging.Logger, types.ModuleType, torch.Generator)
CONTAINERS = (dict, list, set, deque)
MANY = 10_000
"""Longer containers, and what lies beyond so many holders, are passed over."""
MOST_HOLDERS = 100_000
_SAVING = frozenset(
    {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    | {"_non_persistent_buffers_set"}
)
"""Attributes of modules that have nothing to do with their forward."""
_SPECIAL = frozenset({"forward", "__call__", "_call_impl", "__getattr__", "__getattribute__"})
_MISSING = object()


@dataclass(eq=False)
class _Held:
    """A dictionary as it was: its `keys`, and the `values` of those that matter (`names`; None: all), read by `get`."""

    path: str
    holder: dict[Any, Any]
    names: frozenset[str] | None
    keys: list[Any]
    watched: tuple[Any, ...]
    values: tuple[Any, ...]
    get: Callable[[dict[Any, Any]], tuple[Any, ...]]

    def matters(self, key: object) -> bool:
        return (self.names is None or key in self.names) and key not in _SAVING


@dataclass(frozen=True)
class Reads:
    """What some code looks at by name: attributes of modules (None: any), of other objects, and globals."""

    own: frozenset[str] | None = None
    names: frozenset[str] | None = None
    globals: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = ()
    counted: tuple[tuple[str, int], ...] = ()
    """Numbers that every forward adds to and nothing looks at, by path; and what it adds."""
    results: frozenset[str] = frozenset()
    """Paths of attributes in which every forward leaves a tensor, without looking at the one before."""
    stale: tuple[str, ...] = ()
    """Paths of other places where it leaves tensors: in lists and dictionaries, say."""


class Snapshot:
    """What the objects in `roots` (path -> object) hold, and the objects in those, as far as `reads` says."""

    def __init__(self, roots: Mapping[str, object], reads: Reads | None = None) -> None:
        self._reads = reads or Reads()
        self._held: list[_Held] = []
        self._empty: list[Any] = []
        self._empty_paths: list[str] = []
        self._lists: list[tuple[str, Any, tuple[Any, ...]]] = []
        self._asked: list[tuple[str, Callable[[], Any], Any]] = []
        self._puts: list[Callable[[], None]] = []
        self._types: list[tuple[str, object, type]] = []
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        """By identity: path and tensor, of all that were met."""
        self._known: dict[int, object] = {}
        self._queue: deque[tuple[str, object]] = deque()
        for path, root in roots.items():
            self._meet(path, root)
        for namespace, names in self._reads.globals:
            self._globals(namespace, names)
        while self._queue and len(self._known) < MOST_HOLDERS:
            path, item = self._queue.popleft()
            self._visit(path, item)
        self._queue.clear()
        self._looks = [(path, tensor, _looks(tensor)) for path, tensor in self.tensors.values()]

    def change(self) -> str:
        """The path of something that has changed; empty if nothing has."""
        return next((path for path, _, _ in self.changes()), "")

    def changes(self) -> Iterator[tuple[str, object, object]]:
        """What has changed: its path, what it was, what it is."""
        if any(self._empty):
            yield from ((path, (), item) for path, item in zip(self._empty_paths, self._empty, strict=True) if item)
        yield from self._changed_dictionaries()
        for path, items, then in self._lists:
            if (len(items) != len(then) or any(map(is_not, items, then))) and not same(tuple(items), then):
                yield path, then, tuple(items)
        for path, ask, then in self._asked:
            now = ask()
            if not same(now, then):
                yield path, then, now
        for path, item, kind in self._types:
            if type(item) is not kind:
                yield path, kind, type(item)
        for path, tensor, looks in self._looks:
            if _looks(tensor) != looks:
                yield path, looks, _looks(tensor)

    def _changed_dictionaries(self) -> Iterator[tuple[str, object, object]]:
        for held in self._held:
            holder = held.holder
            if [*holder] != held.keys:
                key = self._other_key(held)
                if key:
                    yield key, None, holder
                    continue
            if any(map(is_not, held.get(holder), held.values)):
                for key, now, then in zip(held.watched, held.get(holder), held.values, strict=True):
                    if not same(now, then):
                        yield _below(held.path, key), then, now

    def restore(self) -> None:
        """Put back what lies in attributes and containers. What is as it was is not touched."""
        for empty in self._empty:
            empty.clear()
        for held in self._held:
            then = dict(zip(held.watched, held.values, strict=True))
            if [*held.holder] == held.keys and all(held.holder[key] is value for key, value in then.items()):
                continue
            for key in [key for key in held.holder if key not in held.keys]:
                del held.holder[key]
            held.holder.update(then)
        for _, items, before in self._lists:
            if len(items) != len(before) or any(map(is_not, items, before)):
                items.clear()
                (items.update if isinstance(items, set) else items.extend)(before)
        for put in self._puts:
            put()

    # -- taking it ----------------------------------------------------------------------------------------------

    def _meet(self, path: str, item: object) -> None:
        if type(item) in PLAIN or id(item) in self._known:
            return
        if isinstance(item, Tensor):
            self.tensors.setdefault(id(item), (path, item))
        elif not isinstance(item, LEAVES):
            self._known[id(item)] = item
            self._queue.append((path, item))

    def _visit(self, path: str, item: Any) -> None:
        if isinstance(item, dict):
            self._hold(path, item, None)
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            self._sequence(path, item)
        elif isinstance(item, types.FunctionType):
            self._function(path, item)
        elif isinstance(item, types.MethodType):
            self._meet(path, item.__self__)
            self._meet(path, item.__func__)
        elif isinstance(item, functools.partial):
            self._meet(path, item.func)
            self._meet(f"{path} arguments", item.args)
            self._meet(f"{path} keywords", item.keywords)
        elif isinstance(item, (property, classmethod, staticmethod)):
            for part in (getattr(item, "fget", None), getattr(item, "__func__", None)):
                self._meet(path, part)
        elif isinstance(item, type):
            self._class(item)
        else:
            self._object(path, item)

    def _object(self, path: str, item: Any) -> None:
        hidden = _hidden_state(item)
        if hidden is not None:
            read, put = hidden
            then = read()
            self._asked.append((path, read, then))
            self._puts.append(functools.partial(put, then))
            return
        attributes = getattr(item, "__dict__", None)
        slots = tuple(name for kind in type(item).__mro__ for name in _slots(kind))
        if attributes is None and not slots:
            return
        self._types.append((path, item, type(item)))
        self._meet(type(item).__qualname__, type(item))
        if isinstance(attributes, dict):
            self._hold(path, attributes, self._reads.own if isinstance(item, nn.Module) else self._reads.names)
        if slots:
            look = functools.partial(_slot_values, item, slots)
            self._asked.append((path, look, look()))
            for name, value in zip(slots, look(), strict=True):
                self._meet(_below(path, name), value)

    def _class(self, item: type) -> None:
        for base in item.__mro__:
            known = base is not item and id(base) in self._known
            if known or base in COUNTERS or base.__module__ in ("builtins", "abc", "typing"):
                continue
            self._known[id(base)] = base
            names = self._reads.names
            keys = tuple(
                key for key, value in vars(base).items()
                if (not key.startswith("__") or key in _SPECIAL) and not isinstance(value, types.MemberDescriptorType)
                and (names is None or key in names or key in _SPECIAL)
            )  # fmt: skip
            read = functools.partial(_several, vars(base), keys)
            self._asked.append((base.__qualname__, read, read()))
            self._puts.append(functools.partial(_set_attributes, base, dict(zip(keys, read(), strict=True))))
            if not is_of_torch(base.__module__):
                for key, value in zip(keys, read(), strict=True):
                    self._meet(_below(base.__qualname__, key), value)

    def _globals(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        """Names that code reads: their bindings, what containers and objects hold, attributes read off modules."""
        where = str(namespace.get("__name__", "globals"))
        read = functools.partial(_several, namespace, names)
        self._asked.append((where, read, read()))
        for name, value in zip(names, read(), strict=True):
            if isinstance(value, types.ModuleType):
                wanted = self._reads.names or frozenset()
                keys = tuple(key for key in vars(value) if key in wanted and not key.startswith("__"))
                look = functools.partial(_several, vars(value), keys)
                self._asked.append((f"{where}.{name}", look, look()))
                for key, item in zip(keys, look(), strict=True):
                    if isinstance(item, CONTAINERS):
                        self._meet(f"{where}.{name}.{key}", item)
            elif not is_of_torch(getattr(value, "__module__", None)):
                self._meet(f"{where}.{name}", value)

    def _hold(self, path: str, item: dict[Any, Any], names: frozenset[str] | None) -> None:
        if len(item) > MANY:
            return
        if not item and names is None:
            self._note_empty(path, item)
            return
        results = self._reads.results
        keys = tuple(
            key for key in item
            if (names is None or key in names) and key not in _SAVING and _below(path, key) not in results
        )  # fmt: skip
        get = _nothing if not keys else itemgetter(*keys) if len(keys) > 1 else functools.partial(_one, keys[0])
        self._held.append(_Held(path, item, names, [*item], keys, get(item), get))
        for key in keys:
            self._meet(_below(path, key), item[key])

    def _note_empty(self, path: str, item: Any) -> None:
        self._empty.append(item)
        self._empty_paths.append(path)

    def _other_key(self, held: _Held) -> str:
        """The path of a key that has come or gone, or another order; but for keys that do not matter."""
        before = [key for key in held.keys if held.matters(key)]
        now = [key for key in held.holder if held.matters(key)]
        if before != now:
            return _below(held.path, next(iter({*before} ^ {*now}), "order"))
        held.keys = [*held.holder]
        return ""

    def _sequence(self, path: str, item: Any) -> None:
        if len(item) > MANY:
            return
        if isinstance(item, (list, set, deque)):
            if item:
                self._lists.append((path, item, tuple(item)))
            else:
                self._note_empty(path, item)
        for number, part in enumerate(item):
            self._meet(f"{path}[{number}]", part)

    def _function(self, path: str, item: types.FunctionType) -> None:
        if is_of_torch(item.__module__):
            return
        read = functools.partial(_function_state, item)
        self._asked.append((path, read, read()))
        for value in item.__defaults__ or ():
            self._meet(f"{path} default", value)
        for name, value in (item.__kwdefaults__ or {}).items():
            self._meet(f"{path} default {name}", value)
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            look = functools.partial(_cell_content, cell)
            self._asked.append((f"{path} closure {name}", look, look()))
            self._meet(f"{path} closure {name}", look())
        self._hold(path, item.__dict__, None)


def is_of_torch(name: str | None) -> bool:
    """Whether a module of this name is part of torch."""
    return bool(name) and str(name).partition(".")[0] == "torch"


def same(now: Any, then: Any) -> bool:
    """Whether two plain values are equal, or two objects one."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if type(now) in PLAIN:
        return bool(now == then)
    if isinstance(now, tuple):
        return len(now) == len(then) and all(map(same, now, then))
    if isinstance(now, types.MethodType):
        return now.__self__ is then.__self__ and now.__func__ is then.__func__
    return False


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.requires_grad, tensor.dtype, tensor.shape, tensor.device,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        bool(tensor._backward_hooks), bool(getattr(tensor, "_post_accumulate_grad_hooks", None)),
    )  # fmt: skip


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"


def _nothing(_mapping: Any) -> tuple[Any, ...]:
    return ()


def _one(key: Any, mapping: Any) -> tuple[Any, ...]:
    return (dict.get(mapping, key, _MISSING),)  # of dictionaries that have a `get` of their own, too


def _several(mapping: Any, keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([mapping.get(key, _MISSING) for key in keys])


def _slots(kind: type) -> Iterator[str]:
    names = vars(kind).get("__slots__", ())
    yield from (name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


def _slot_values(item: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(item, name, _MISSING) for name in names)


def _function_state(item: types.FunctionType) -> tuple[Any, ...]:
    return item.__code__, item.__defaults__, item.__kwdefaults__


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


def _set_attributes(kind: type, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _left(_state: object) -> None:
    """What cannot be put back."""


def _hidden_state(item: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """How to read and put back what an object keeps where Python cannot see it: random numbers, arrays, counters."""
    if isinstance(item, random.Random):
        return item.getstate, item.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(item, numpy.random.Generator):
            state = copy.deepcopy(item.bit_generator.state)
            return lambda: repr(item.bit_generator.state), lambda _: setattr(item.bit_generator, "state", state)
        if isinstance(item, numpy.random.RandomState):
            kept = item.get_state()
            return lambda: repr(item.get_state()), lambda _: item.set_state(kept)
        if isinstance(item, numpy.ndarray):
            return lambda: (item.shape, str(item.dtype), item.tobytes()), _left
    if type(item).__module__ == "itertools":
        return lambda: repr(item), _left
    return None
