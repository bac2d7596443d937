"""Snapshots of Python objects: stored by identity, compared in about a microsecond per object, and restored.

A captured step has the Python values that its code read (a dropout's `p`, hooks, a closure's cells, globals) as
constants. Objects that the code can reach by name are watched; objects that cannot be watched are listed in
`Snapshot.unwatched`. Dynamo's guards, checked in C++, take a third of the time (`benchmarks/guards.py`), but do not
report what changed, cannot restore it, and have another interface in every release of torch.
"""

from __future__ import annotations

import abc
import argparse
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import call, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from magis.capture.names_in_code import Reads
from magis.ops.python_objects import (
    ASKED,
    CONTAINERS,
    GETTERS,
    LEAVES,
    MANY,
    MISSING,
    MOST_HOLDERS,
    PLAIN,
    SAVING,
    attributes,
    codes_within,
    function_state,
    hidden_state,
    is_called,
    is_of_system,
    is_opaque,
    names_of_class,
    order_of_class,
    package,
    parts,
    same,
    scheduled,
    slot_values,
    slots,
)

_OURS = ("magis.capture.", "magis.strategies.", "magis.extensions.ranks.", "magis.extensions.compile.")
"""Prefixes of the modules whose hooks exist only while a step is captured."""
_ALL_CONTAINERS = (*CONTAINERS, tuple, frozenset)
_TEXTS = frozenset({"__doc__", "__annotations__", "__name__", "__qualname__"})
_COUNT_OBJECTS = (RemovableHandle,)
"""Classes of torch that count their instances."""


@dataclass(eq=False)
class _Held:
    """A dictionary with its old `keys`, and the old `values` of watched keys (`names`; None: all keys)."""

    path: str
    holder: dict[Any, Any]
    names: frozenset[str] | None
    step: str
    keys: list[Any]
    watched: tuple[Any, ...]
    values: tuple[Any, ...]

    def matters(self, key: object) -> bool:
        return (self.names is None or key in self.names) and key not in SAVING


@contextmanager
def objects_kept(roots: Mapping[str, object]) -> Iterator[Snapshot]:
    """Restore these objects, and those that they hold, at the end of the block."""
    before = Snapshot(roots)
    try:
        yield before
    finally:
        before.restore()


class Snapshot:
    """The contents of all objects reachable from `roots` (path -> object) by the names in `reads`, except the objects
    in `apart` (by `id`)."""

    def __init__(
        self, roots: Mapping[str, object], reads: Reads | None = None, *, apart: Collection[int] = frozenset()
    ) -> None:
        self._reads, self._apart = reads or Reads(), apart
        self.held: list[_Held] = []
        self._empty: list[tuple[str, Any]] = []
        self._lists: list[tuple[str, Any, tuple[Any, ...]]] = []
        self._named: list[tuple[str, functools.partial[tuple[Any, ...]], tuple[Any, ...]]] = []
        self._asked: list[tuple[str, Callable[[], Any], Any]] = []
        self._puts: list[Callable[[], None]] = []
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        """Path and tensor, by `id`, of all tensors that were found."""
        self.unwatched: list[str] = []
        """Paths of objects whose changes the snapshot cannot detect."""
        self._known: dict[int, object] = {}
        self._codes: set[types.CodeType] = set()
        self._queue: deque[tuple[str, object]] = deque()
        self._take(roots)
        self._looks = [(path, tensor, looks(tensor)) for path, tensor in self.tensors.values()]
        self._keys = [held.keys for held in self.held]
        read = [(held.holder, held.watched, held.values) for held in self.held if held.watched]
        read += [(ask.args[1], ask.args[0], then) for _, ask, then in self._named]
        self._read = [mapping for mapping, _, _ in read]
        # the first key twice: a getter of a single key returns no tuple
        self._getters = [itemgetter(*keys, keys[0]) for _, keys, _ in read]
        self._values = [value for _, _, then in read for value in (*then, then[0])]

    def _take(self, roots: Mapping[str, object]) -> None:
        more: set[str] = set()
        for path, root in roots.items():
            self._meet(path, root)
        for namespace, names in self._reads.globals:
            self._bindings(str(namespace.get("__name__", "globals")), namespace, names)
        for name in self._reads.imported:
            self._meet(name, self._ask(name, functools.partial(sys.modules.get, name)))
        for name, ask in self._reads.asked:
            self._ask(name, ask)
        self._class(Tensor)
        self._drain(more)
        if unmet := self._reads.codes - self._codes:
            for function in self._reads.functions(unmet):
                self._meet(function.__qualname__, function)
            self._drain(more)
        self.met = frozenset(self._known)
        self._known.clear()  # else weakly referenced objects would stay alive
        if more - self._reads.user:  # names known to getters only: start again with them
            self.__init__(roots, self._reads.more(more), apart=self._apart)  # type: ignore[misc]

    def _drain(self, more: set[str]) -> None:
        while self._queue:
            path, item = self._queue.popleft()
            if len(self._known) > MOST_HOLDERS:
                self.unwatched.append(f"{path}, beyond {MOST_HOLDERS:,} objects")
                break
            if isinstance(item, GETTERS):  # add the names that they look up
                texts = (each for each in item.__reduce__()[1] if isinstance(each, str))
                more.update(part for each in texts for part in each.split("."))
            self._visit(path, item)
        self._queue.clear()

    def changes(self) -> Iterator[tuple[str, object, object]]:
        """Yield path, old value and new value of everything that has changed."""
        held, named = ((), ()) if self._names_are_as_taken() else (self.held, self._named)
        yield from self._left(held)
        for path, several, then in named:
            if not same(now := several(), then):
                yield path, then, now
        for path, ask, then in self._asked:
            now = ask()
            if now is not then and not same(now, then):
                yield path, then, now
        for path, tensor, then in self._looks:
            if (now := looks(tensor)) != then:
                yield path, then, now

    def _names_are_as_taken(self) -> bool:
        """Return True if no dictionary and no namespace has changed. No value is compared in a Python loop."""
        if [[*held.holder] for held in self.held] != self._keys:
            return False
        try:
            now = chain.from_iterable(map(call, self._getters, self._read))
            return not any(map(is_not, now, self._values))
        except KeyError:
            return False

    def left(self) -> Iterator[tuple[str, object, object]]:
        """Yield path, old value and new value of changes in attributes and containers."""
        return self._left(self.held)

    def _left(self, dictionaries: Iterable[_Held]) -> Iterator[tuple[str, object, object]]:
        for path, item in self._empty:
            if item:
                yield path, (), item
        for held in dictionaries:
            if [*held.holder] != held.keys or any(map(is_not, _several(held.watched, held.holder), held.values)):
                yield from self._changed(held)
        for path, items, then in self._lists:
            if (len(items) != len(then) or any(map(is_not, items, then))) and not same(tuple(items), then):
                yield path, then, tuple(items)

    def _changed(self, held: _Held) -> Iterator[tuple[str, object, object]]:
        holder, there = held.holder, dict(zip(held.watched, held.values, strict=True))
        before, now = ([key for key in keys if held.matters(key)] for keys in (held.keys, holder))
        if before == now:  # unwatched keys may come and go
            held.keys[:] = holder
        elif {*before} == {*now}:
            yield f"{held.path}/{held.step}order", before, now
        for key in sorted({*before} ^ {*now}, key=str):
            if key not in there:
                yield f"{held.path}/{held.step}{key}", MISSING, holder.get(key, MISSING)
        for key, then in there.items():
            value = dict.get(holder, key, MISSING)
            if not same(value, then):
                yield f"{held.path}/{held.step}{key}", then, value

    def restore(self) -> None:
        """Restore the contents of attributes and containers that have changed."""
        for _, empty in self._empty:
            empty.clear()
        for held in self.held:
            then = dict(zip(held.watched, held.values, strict=True))
            if [*held.holder] == held.keys and all(held.holder[key] is value for key, value in then.items()):
                continue
            then = {key: held.holder[key] for key in held.keys if key in held.holder} | then
            held.holder.clear()
            held.holder.update(then)
        for _, items, before in self._lists:
            if len(items) != len(before) or any(map(is_not, items, before)):
                items.clear()
                (items.update if isinstance(items, set) else items.extend)(before)
        for put in self._puts:
            put()

    # -- taking a snapshot --------------------------------------------------------------------------------------

    def _meet(self, path: str, item: object) -> None:
        if type(item) in PLAIN or id(item) in self._known or id(item) in self._apart or item is MISSING:
            return
        if is_opaque(item):
            self.unwatched.append(f"{path}, which has no attributes that others can read")
        elif isinstance(item, Tensor):
            if id(item) not in self.tensors:
                self.tensors[id(item)] = (path, item)
                self._hold_tensor(path, item)
        elif not isinstance(item, LEAVES) and (
            isinstance(item, nn.Module) or not f"{type(item).__module__}".startswith(_OURS)
        ):
            self._known[id(item)] = item
            self._queue.append((path, item))

    def _hold_tensor(self, path: str, item: Tensor) -> None:
        if type(item) not in (Tensor, nn.Parameter):
            self._meet(type(item).__qualname__, type(item))
        elif self._reads.names is not None:
            self._hold(path, vars(item), self._reads.names, ".")
        if "_version" in self._reads.user:
            self.unwatched.append(f"{path}/._version")
        if "grad" in self._reads.user and item.is_leaf and item.requires_grad and not isinstance(item, nn.Parameter):
            self._meet(f"{path}/.grad", self._ask(f"{path}/.grad", functools.partial(getattr, item, "grad")))

    def _visit(self, path: str, item: Any) -> None:
        names = self._reads.own if isinstance(item, nn.Module) else self._reads.names
        if isinstance(item, (types.SimpleNamespace, argparse.Namespace)):
            names = None  # all attributes: it is compared and printed as a whole
        if isinstance(item, types.ModuleType):
            wanted = tuple(key for key in vars(item) if key in self._reads.user and not key.startswith("__"))
            self._bindings(path, vars(item), wanted, theirs=is_of_system(item.__name__))
            return
        if isinstance(item, type):
            self._class(item)
            return
        if isinstance(item, types.FunctionType) and f"{item.__module__}.".startswith(("torch.", _OURS[-1])):
            return
        if isinstance(item, weakref.ref):  # watch the referent without keeping it alive
            self._weak(path, item)
            return
        if isinstance(item, types.BuiltinFunctionType) and isinstance(item.__self__, types.ModuleType):
            return
        self._watch(path, item, names)
        if isinstance(item, _ALL_CONTAINERS) and len(item) > MANY:
            return
        for step, value in parts(item, names):
            if f"{path}/{step}" not in self._reads.results:
                self._meet(f"{path}/{step}", value)

    def _watch(self, path: str, item: Any, names: frozenset[str] | None) -> None:
        """Record the contents of an object itself, by its kind."""
        if isinstance(item, _ALL_CONTAINERS):
            if len(item) > MANY:
                self.unwatched.append(f"{path}, {len(item):,} objects long")
            elif not item and isinstance(item, CONTAINERS):
                self._empty.append((path, item))
            elif isinstance(item, dict):
                self._hold(path, item, None, "{")
            elif isinstance(item, CONTAINERS):
                self._lists.append((path, item, tuple(item)))
        elif isinstance(item, types.FunctionType):
            self._function(path, item)
        elif isinstance(item, ASKED):
            self._ask(path, lambda: tuple(value for _, value in parts(item, names)))
        elif isinstance(item, Optimizer):
            self._optimizer(path, item)
        elif not isinstance(item, (types.MethodType, types.BuiltinFunctionType)):
            self._hidden(path, item)
        held = attributes(item)
        if held is not None and not isinstance(item, Optimizer):
            self._hold(path, held, names, ".")
        slotted = slots(type(item))  # type: ignore[arg-type]  # a class is hashable
        if not isinstance(item, types.FunctionType) and (held is not None or slotted):
            self._ask(f"{path}/.__class__", functools.partial(type, item))
            self._meet(type(item).__qualname__, type(item))
        if slotted:
            self._ask(path, functools.partial(slot_values, item, slotted))

    def _function(self, path: str, item: types.FunctionType) -> None:
        self._codes.update(codes_within(item.__code__))
        self._ask(path, functools.partial(function_state, item))
        for name in _TEXTS & self._reads.user:
            self._meet(f"{path}/.{name}", self._ask(path, functools.partial(getattr, item, name)))

    def _optimizer(self, path: str, item: Optimizer) -> None:
        if not self._reads.user.isdisjoint(("state", "state_dict")):  # which every step changes
            self.unwatched.append(f"{path}/.state")
        if self._reads.names is None or "param_groups" in self._reads.names:
            self._ask(path, functools.partial(scheduled, item))

    def _weak(self, path: str, item: weakref.ref[Any]) -> None:
        target = item()
        self._ask(path, lambda: item() is None)
        held = attributes(target)
        if held is None or isinstance(target, (Tensor, type, types.FunctionType, *CONTAINERS)) or slots(type(target)):  # type: ignore[arg-type]
            self._meet(f"{path}/()", target)
            return
        names = self._reads.own if isinstance(target, nn.Module) else self._reads.names
        self._meet(type(target).__qualname__, type(target))
        self._hold(f"{path}/()", held, names, ".")
        for step, value in parts(target, names):
            self._meet(f"{path}/()/{step}", value)

    def _ask(self, path: str, ask: Callable[[], Any]) -> Any:
        then = ask()
        self._asked.append((path, ask, then))
        return then

    def _hidden(self, path: str, item: Any) -> None:
        """Watch state that an object keeps outside of attributes: random numbers, arrays, counters."""
        hidden = hidden_state(item)
        if hidden is None:
            return
        read, put = hidden
        if read is None:
            self.unwatched.append(f"{path}, a {type(item).__module__}.{type(item).__qualname__}")
            return
        then = self._ask(path, read)
        if put is not None:
            self._puts.append(functools.partial(put, then))

    def _class(self, item: type) -> None:
        if isinstance(item, abc.ABCMeta) and "isinstance" in self._reads.user and not is_of_system(item):
            self._ask(f"{item.__qualname__}/.register", abc.get_cache_token)
        meta: type = type(item)
        for base in (*item.__mro__, *meta.__mro__):
            known = base is not item and id(base) in self._known
            if known or base in _COUNT_OBJECTS or base.__module__ in ("builtins", "abc", "typing"):
                continue
            self._known[id(base)] = base
            names = self._reads.user if issubclass(base, torch._C.TensorBase) else self._reads.names
            keys = names_of_class(base, names)
            self._ask(base.__qualname__, functools.partial(order_of_class, base, names, keys, len(vars(base))))
            then = self._names(base.__qualname__, keys, vars(base))
            self._puts.append(functools.partial(_set_attributes, base, dict(zip(keys, then, strict=True))))
            if not is_of_system(base):
                for key, value in zip(keys, then, strict=True):
                    if not is_called(key, value):  # methods that ran are in `functions`
                        self._meet(f"{base.__qualname__}/.{key}", value)

    def _bindings(
        self, path: str, namespace: Mapping[str, Any], names: tuple[str, ...], *, theirs: bool = False
    ) -> None:
        """Watch the names that code reads in a namespace; with `theirs`, of torch or Python, functions are not
        entered."""
        for name, value in zip(names, self._names(path, names, namespace), strict=True):
            torchs = isinstance(value, types.FunctionType) and package(value) == "torch"
            entered = isinstance(value, (types.ModuleType, type, *CONTAINERS)) if theirs else not torchs
            if entered and value is not sys.modules:
                self._meet(f"{path}/.{name}", value)

    def _hold(self, path: str, item: dict[Any, Any], names: frozenset[str] | None, step: str) -> None:
        results = self._reads.results
        keys = tuple(
            key for key in item
            if (names is None or key in names) and key not in SAVING and f"{path}/{step}{key}" not in results
        )  # fmt: skip
        self.held.append(_Held(path, item, names, step, [*item], keys, _several(keys, item)))

    def _names(self, path: str, names: tuple[str, ...], mapping: Mapping[str, Any]) -> tuple[Any, ...]:
        ask = functools.partial(_several, names, mapping)
        then = ask()
        if not then or any(value is MISSING for value in then) or type(mapping) not in (dict, types.MappingProxyType):
            return self._ask(path, ask)  # type: ignore[no-any-return]
        self._named.append((path, ask, then))
        return then


def looks(tensor: Tensor) -> tuple[Any, ...]:
    """Return the metadata of a tensor on which a captured step depends."""
    return (
        tensor.requires_grad, tensor.dtype, tensor.shape, tensor.device,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        bool(tensor._backward_hooks), bool(getattr(tensor, "_post_accumulate_grad_hooks", None)),
    )  # fmt: skip


def _several(keys: tuple[Any, ...], mapping: Any) -> tuple[Any, ...]:
    get = dict.get if isinstance(mapping, dict) else type(mapping).get  # a subclass may override `get`
    return tuple([get(mapping, key, MISSING) for key in keys])


def _set_attributes(kind: type, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)
