"""The numbers that a snapshot of Python objects watches: read and written by path."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor

from magis.capture import snapshot as snapshots
from magis.capture.snapshot import Snapshot
from magis.ops.python_objects import function_state, is_of_system, same, scheduled, slot_values

CONTENTS = ("input:", "target:", "buffer:", "held:", "kept:")
"""Prefixes of the names of tensors off which Python reads numbers."""
OFF = "off "
"""Prefix of the paths of numbers that are read off a tensor."""


def changed_numbers(changes: Iterable[tuple[str, object, object]]) -> frozenset[str] | None:
    """Return the paths of changed numbers, if only numbers changed and kept their types; else None."""
    found = set()
    for path, then, now in changes:
        pairs = [(path, then, now)]
        if isinstance(then, (tuple, list)) and type(then) is type(now) and len(then) == len(now):
            each = zip(count(), then, now, strict=False)
            pairs = [(f"{path}[{index}]", a, b) for index, a, b in each if not same(a, b)]
        elif isinstance(then, dict) and isinstance(now, dict) and [*then] == [*now]:
            pairs = [(f"{path}/{{{key}", a, now[key]) for key, a in then.items() if not same(a, now[key])]
        for place, a, b in pairs:
            if isinstance(a, Tensor) and isinstance(b, Tensor) and path.startswith(CONTENTS):
                found.add(f"{OFF}{path}")
                continue
            if type(a) is not type(b) or type(b) not in (int, float):
                return None
            found.add(place)
    return frozenset(found)


class NumberPlaces:
    """The numbers that a snapshot watches, by path."""

    def __init__(self, watched: Snapshot) -> None:
        self._watched = watched
        self._found: dict[str, tuple[Any, Any]] = {}

    @property
    def namespaces(self) -> list[dict[str, Any]]:
        """Namespaces in which the user's own code looks up names."""
        spaces = (namespace for namespace, _ in self._watched._reads.globals)
        return [each for each in spaces if not is_of_system(str(each.get("__name__", "")))]

    def has(self, path: str) -> bool:
        """Return True if the number at a path can be read and replaced."""
        return self._at(path) is not None

    def read(self, path: str) -> Any:
        """Return the current number at a path."""
        holder, key = self._at(path) or ({}, path)
        return getattr(holder, key) if isinstance(key, _Attribute) else holder[key]

    def write(self, path: str, number: Any) -> None:
        """Store a value at a path."""
        holder, key = self._at(path) or ({}, path)
        if isinstance(key, _Attribute):
            setattr(holder, key, number)
        else:
            holder[key] = number

    def holding(self, wanted: Collection[Any]) -> dict[str, Any]:
        """Find which of some functions the watched names hold; return them by path."""
        known = {*map(id, wanted)}
        found = {}
        for path, (holder, key) in self._all():
            try:
                item = getattr(holder, key, None) if isinstance(key, _Attribute) else holder[key]
            except (LookupError, ValueError):  # nothing is there now
                continue
            if id(item) in known:
                found[path] = item
        return found

    def _at(self, path: str) -> tuple[Any, Any] | None:
        """Return the holder of the number at a path, and its key or attribute; None if the path is unknown."""
        if path not in self._found:
            found = next((place for known, place in self._all() if known == path), None)
            if found is None:
                return None
            self._found[path] = found
        return self._found[path]

    def _all(self) -> Iterator[tuple[str, tuple[Any, Any]]]:
        watched: Any = self._watched
        for held in watched.held:
            for key, value in zip(held.watched, held.values, strict=True):
                yield from _with_parts(f"{held.path}/{held.step}{key}", held.holder, key, value)
        for path, items, then in watched._lists:
            if isinstance(items, list):
                yield from ((f"{path}[{index}]", (items, index)) for index in range(len(then)))
        puts = (each for each in watched._puts if isinstance(each, partial) and each.func is snapshots._set_attributes)
        classes = {each.args[0].__qualname__: each.args[0] for each in puts}
        for path, ask, _ in (*watched._asked, *watched._named):
            function: Any = getattr(ask, "func", None)
            given: Any = getattr(ask, "args", ())
            if function is function_state:  # cells follow code and defaults
                cells = enumerate(given[0].__closure__ or (), 3)
                yield from ((f"{path}[{index}]", (cell, _Attribute("cell_contents"))) for index, cell in cells)
            elif function is slot_values:
                yield from ((f"{path}[{n}]", (given[0], _Attribute(name))) for n, name in enumerate(given[1]))
            elif function is scheduled:
                rates = ((each, key) for each in given[0].param_groups for key in each if key != "params")
                yield from ((f"{path}[{index}]", place) for index, place in enumerate(rates))
            elif function is snapshots._several:
                for index, key in enumerate(given[0]):
                    if isinstance(given[1], dict):
                        yield f"{path}[{index}]", (given[1], key)
                    elif path in classes:
                        yield f"{path}[{index}]", (classes[path], _Attribute(key))


def _with_parts(path: str, holder: Any, key: Any, value: object) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield a place, and the places of the elements if it holds a list or a dictionary, which may be replaced at any
    step."""
    yield path, (holder, key)
    if isinstance(value, list):
        yield from ((f"{path}[{index}]", (_Within(holder, key), index)) for index in range(len(value)))
    elif isinstance(value, dict):
        yield from ((f"{path}/{{{each}", (_Within(holder, key), each)) for each in value)


@dataclass(frozen=True, eq=False)
class _Within:
    """The list or dictionary that is currently stored under a key of a holder."""

    holder: Any
    key: Any

    def __getitem__(self, key: Any) -> Any:
        return self.holder[self.key][key]

    def __setitem__(self, key: Any, number: Any) -> None:
        self.holder[self.key][key] = number


class _Attribute(str):
    """A key that is the name of an attribute."""

    __slots__ = ()
