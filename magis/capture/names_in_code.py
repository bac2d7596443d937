"""The names that code looks up, as found in its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_MODULES = frozenset({"import_module", "__import__", "modules"})


@dataclass(frozen=True)
class Reads:
    """The names that a step's code looks up: attributes of modules (`own`) and of other objects (`names`; None: any
    name), and names in Python modules and namespaces, for a user's own code only (`user`, `globals`)."""

    own: frozenset[str] | None = None
    names: frozenset[str] | None = None
    user: frozenset[str] = frozenset()
    globals: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = ()
    imported: tuple[str, ...] = ()
    """Modules that functions import when they run, including missing ones."""
    codes: frozenset[types.CodeType] = frozenset()
    """Code of the functions that ran, except torch's."""
    functions: Callable[[frozenset[types.CodeType]], Iterable[types.FunctionType]] = lambda _: ()
    """Finds functions with such code that no path leads to, as a class or C holds them."""
    asked: tuple[tuple[str, Callable[[], Any]], ...] = ()
    """Settings of the process that the code read, by name, with a function that reads each again."""
    counted: tuple[tuple[str, int], ...] = ()
    """Numbers that every forward adds to and no code reads, by path; and the summand."""
    results: frozenset[str] = frozenset()
    """Paths of attributes in which every forward stores a tensor, without reading the previous one."""
    state: frozenset[str] = frozenset()
    """Paths of attributes in which every forward stores a tensor after reading the previous one: state of the step."""
    moved: frozenset[str] = frozenset()
    """Paths of numbers in attributes that every forward reads and changes."""
    clocks: Mapping[str, int] = field(default_factory=dict)
    """Paths of numbers in which every forward stores times, with the shift that detects code which reads them."""
    stale: tuple[str, ...] = ()
    """Names of other places where the forward stores tensors: lists and dictionaries, say."""

    def more(self, names: set[str]) -> Reads:
        """Return the reads with further names."""
        own, known = (None if each is None else each | names for each in (self.own, self.names))
        return replace(self, own=own, names=known, user=self.user | names)


@functools.lru_cache(maxsize=4096)
def names_read(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the names that code loads, strings that may be names included, but not those it only stores or increments;
    the names of globals; and the modules that it imports."""
    counts, found, bare, modules = counting_loads(code), set[str](), set[str](), set[str]()
    steps = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    for at, one in enumerate(steps):
        if one.opname == "IMPORT_NAME":
            name = f"{'.' * (steps[at - 2].argval or 0)}{one.argval}"
            modules |= {name, name if name[0] == "." else name.partition(".")[0]}
        elif one.opname == "IMPORT_FROM" or (one.opname.startswith("LOAD_") and one.argval in code.co_names):
            found |= set() if one.offset in counts else {str(one.argval)}
            bare |= {str(one.argval)} if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") else set()
    strings = {item for item in _flat(code.co_consts) if isinstance(item, str)}
    if not _MODULES.isdisjoint(code.co_names):
        modules |= {item for item in strings if all(map(str.isidentifier, item.split(".")))}
    parts = {part for item in strings for part in item.split(".") if part.isidentifier()}
    return frozenset(found | parts), frozenset(bare), frozenset(modules)


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the constants of code, with those inside tuples: a `match` has attribute names there."""
    for item in items:
        if isinstance(item, (tuple, frozenset)):
            yield from _flat(item)
        else:
            yield item


@functools.lru_cache(maxsize=4096)
def matches_by_position(code: types.CodeType) -> bool:
    """Return True for code with a pattern such as `case Point(x, y)`, whose attributes only the class knows."""
    return any(one.opname == "MATCH_CLASS" and one.arg for one in dis.get_instructions(code))


_ADDS = ("+", "+=")


@functools.lru_cache(maxsize=4096)
def counting_loads(code: types.CodeType) -> frozenset[int]:
    """Return the offsets of instructions that load an attribute only to store it again with a number added."""
    steps = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    loads: dict[str, list[int]] = {}
    stores: Counter[str] = Counter()
    found: set[int] = set()
    for at, one in enumerate(steps):
        if one.opname == "LOAD_ATTR" and at and steps[at - 1].opname in ("COPY", "DUP_TOP"):
            loads.setdefault(str(one.argval), []).append(one.offset)
        elif one.opname == "STORE_ATTR" and at > 1:
            if steps[at - 1].opname == "SWAP" and steps[at - 2].argrepr == "+=":
                stores[str(one.argval)] += 1
            elif _adds(steps, at):
                found.add(steps[at - 4].offset)
    for name, offsets in loads.items():
        if stores[name] == len(offsets):  # every load begins a `+=`
            found.update(offsets)
    return frozenset(found)


def _adds(steps: list[dis.Instruction], at: int) -> bool:
    """Return True if the store at `at` is that of `self.n = self.n + 1`: holder, load, constant, sum, holder again."""
    if at < 5:
        return False
    holder, load, number, total, again = steps[at - 5 : at]
    return (
        load.opname == "LOAD_ATTR"
        and load.argval == steps[at].argval
        and number.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        and total.argrepr in _ADDS
        and again.opname.startswith("LOAD_FAST")
        and (holder.opname, holder.argval) == (again.opname, again.argval)
    )
