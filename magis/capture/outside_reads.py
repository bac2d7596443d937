"""The code that a step runs: what it is, what it calls in C, and what of the process it asks for.

Values that code finds by a name are watched (`magis.capture.snapshot`). A function in C may look elsewhere: at files,
clocks, locks, settings of the process. Those that a user's own code calls, by itself or through Python's library, are
functions of their arguments alone, are watched by calling them again, or are refused. Libraries of others are trusted:
they log, and look at clocks for that.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import importlib.util
import linecache
import logging
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from magis.capture.python_state import objects_of
from magis.capture.snapshot import Reads
from magis.errors import CaptureError
from magis.ops.generators import called_first
from magis.ops.python_objects import MISSING, SYSTEM, cell_content, is_of_system, is_of_torch

_CLOCKS = tuple(
    name + unit for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time") for unit in ("", "_ns")
)
LATER = 86_400 * 365
"""Seconds by which clocks are put forward, to see whether the step computes with them."""
_QUIET = frozenset({"logging", "warnings", "traceback", "importlib", "tokenize", "pdb", "contextlib"})
"""Parts of Python's library that look around for themselves: what they find is in no number of a step."""
_SAFE = frozenset({
    "builtins", "math", "cmath", "operator", "itertools", "functools", "collections", "re", "struct", "random",
    "copyreg", "typing", "abc", "weakref", "array", "decimal", "datetime", "fractions", "statistics", "bisect", "heapq",
    "json", "sre", "string", "codecs", "csv", "pickle", "zlib", "binascii", "hashlib", "sha1", "sha2", "sha256",
    "sha512", "md5", "blake2", "contextvars", "locale", "ast", "opcode", "symtable", "inspect", "types", "enum",
    "unicodedata", "ctypes", "stat", "tracemalloc", "copy", "asyncio", "imp", "warnings",
})  # fmt: skip
"""Python's modules whose functions, and methods of whose objects, are functions of what others can watch."""
_HARMLESS = frozenset({
    "sleep", "fspath", "fsencode", "fsdecode", "getpid", "exc_info", "_getframe", "intern", "getsizeof", "exit",
    "write", "writelines", "flush", "close", "acquire", "release", "__enter__", "__exit__", "collect", "putenv",
    "unsetenv", "audit", "StringIO", "BytesIO", "getvalue", "get_objects", "get_referrers", "notify", "put",
    "allocate_lock", "RLock",
})  # fmt: skip
"""Functions of other modules whose results say nothing, or nothing that changes."""
_REFUSED = frozenset({"open", "input", "now", "today", "utcnow", "locked"})
_LEVELS = {logging.Logger.isEnabledFor.__code__, logging.Logger.getEffectiveLevel.__code__}
_NAMED: dict[str, Callable[[], Any]] = {
    "Decimal": lambda: repr(sys.modules["decimal"].getcontext()),
    "geterr": lambda: repr(sys.modules["numpy"].geterr()),
    "fill_uninitialized_memory": torch._C._get_deterministic_fill_uninitialized_memory,
    "threading": lambda: tuple((key, each.name) for key, each in vars(threading)["_active"].items()),
    "linecache": lambda: tuple(linecache.cache.values()),
    "catch_warnings": lambda: tuple(sys.modules["warnings"].filters),
    "torch._tensor_str": lambda: repr(vars(sys.modules["torch._tensor_str"].PRINT_OPTS)),
}
"""Settings that operators, properties and Python's library read, by a name in code or a module that comes to them."""

_BY_NAME = frozenset({"vars", "dir", "__dict__", "attrgetter", "eval", "exec", "__getattribute__"})
"""Names in code that reads attributes by names made at run time; `getattr` itself tells."""
_MODULES = frozenset({"import_module", "__import__", "modules"})
_ALWAYS = frozenset(
    {"forward", "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    | {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
    | {"_forward_hooks_always_called", "_is_full_backward_hook"}
    | {"_backward_fn", "_setup_context_fn", "_backends_to_fns"}  # of custom operators
)
_BELOW = ("magis.capture", "magis.ops", "magis.cases.tensor_ledger", "torch._", "torch.fx", "torch.utils._")
"""Code below the forward's own: it runs operators, or watches them."""


class Ran:
    """The code that ran in a block, and what it asked of the process."""

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, dict[str, Any]] = {}
        """With the globals of each."""
        self.names: set[str] = set()
        """Given to `getattr` and `hasattr`."""
        self.asked: dict[str, Callable[[], Any]] = {}
        self.refused = ""
        self._cells: dict[types.CodeType, set[tuple[int, ...]]] = {}
        self._functions: dict[frozenset[types.CodeType], tuple[types.FunctionType, ...]] = {}
        self._modules: set[str] = set()
        self._homes: dict[types.CodeType, str] = {}

    def check(self) -> None:
        """Raise CaptureError for what was called and cannot be watched."""
        if self.refused:
            raise CaptureError(
                f"the step calls {self.refused}, and nobody sees when its result changes",
                hint="call it before the step, and keep the number or a tensor in an attribute",
            )

    @contextmanager
    def listening(self, later: int = 0) -> Iterator[None]:
        """Collect the code of every Python function that is called, with clocks some seconds ``later``.

        Garbage is not collected meanwhile: whoever is called then (`gc.callbacks`, `__del__`) is no part of the step.
        """
        replaced: list[tuple[Any, str, Any, Any]] = [
            (builtins, name, getattr(builtins, name), partial(self._asking, getattr(builtins, name)))
            for name in ("getattr", "hasattr")
        ]
        for name in _CLOCKS:
            clock, unit = getattr(time, name), 10**9 if name.endswith("_ns") else 1
            replaced.append((time, name, clock, partial(_put_forward, clock, later * unit, threading.get_ident())))
        collecting = gc.isenabled()
        gc.disable()
        try:
            for place, name, _, new in replaced:
                setattr(place, name, new)
            with called_first(self._hear):
                yield
        finally:
            for place, name, old, _ in replaced:
                setattr(place, name, old)
            if collecting:
                gc.enable()

    def reads(self) -> Reads:
        """What the code that ran looks up."""
        names, user, imported, by_name = {*_ALWAYS, *self.names}, {*self.names}, set[str](), False
        wanted: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, namespace in self.codes.items():
            module = str(namespace.get("__name__", ""))
            if module.startswith(_BELOW):
                continue
            if is_of_system(module):
                names.update(code.co_names)
                if module == "os" and "_data" in code.co_names:
                    wanted[id(namespace)] = namespace, {"environ"}
                continue
            read, bare, further = _names_read(code)
            package = str(namespace.get("__package__") or module.rpartition(".")[0])
            imported |= {importlib.util.resolve_name(name, package) for name in further if package or name[:1] != "."}
            user |= read
            by_name = by_name or not _BY_NAME.isdisjoint(code.co_names)
            anything = "globals" in code.co_names
            here = {name for name in (namespace if anything else read) if name in namespace}
            wanted.setdefault(id(namespace), (namespace, set()))[1].update(here, bare)
        found = frozenset(names | user)
        built_in = {name for _, read in wanted.values() for name in read if hasattr(builtins, name)}
        wanted[id(builtins)] = vars(builtins), built_in
        spaces = tuple((namespace, tuple(sorted(read))) for namespace, read in wanted.values() if read)
        every = None if by_name else found
        return Reads(
            every, every, frozenset(user), spaces, tuple(sorted(imported)),
            codes=frozenset(self._cells), functions=self.functions, asked=self.settings(user),
        )  # fmt: skip

    def functions(self, codes: frozenset[types.CodeType]) -> tuple[types.FunctionType, ...]:
        """Those of such code that ran, as far as they are there still: all objects of the process are looked at."""
        if codes not in self._functions:
            found: dict[types.CodeType, list[types.FunctionType]] = {}
            for item in objects_of(types.FunctionType):
                if item.__code__ in codes:
                    found.setdefault(item.__code__, []).append(item)
            self._functions[codes] = tuple(
                item for code, some in found.items() for item in some if len(some) == 1 or self._has_run(code, item)
            )  # fmt: skip
        return self._functions[codes]

    def _has_run(self, code: types.CodeType, item: types.FunctionType) -> bool:
        return tuple(id(cell_content(cell)) for cell in item.__closure__ or ()) in self._cells[code]

    def settings(self, names: Iterable[str]) -> tuple[tuple[str, Callable[[], Any]], ...]:
        """What was asked for, with what code asks for by these names."""
        known = {*names, *self._modules}
        return (*self.asked.items(), *((name, ask) for name, ask in _NAMED.items() if name in known))

    # -- while it runs ------------------------------------------------------------------------------------------

    def _asking(self, look: Callable[..., Any], item: object, name: Any, *default: Any) -> Any:
        if isinstance(name, str):
            self.names.add(name)
        return look(item, name, *default)

    def _hear(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.codes.setdefault(code, frame.f_globals)
            home = self._home(frame)
            if home in ("user", "library"):
                cells = tuple(id(frame.f_locals.get(name, MISSING)) for name in code.co_freevars)
                self._cells.setdefault(code, set()).add(cells)
            elif code in _LEVELS and frame.f_back is not None and self._home(frame.f_back) == "user":
                logger = frame.f_locals["self"]
                self.asked[f"the level of {logger.name}"] = lambda: (logger.getEffectiveLevel(), logger.disabled)
            elif f"{frame.f_globals.get('__name__')}" in _NAMED and (home == "torch" or self._is_of_user(frame)):
                self._modules.add(frame.f_globals["__name__"])
        elif event == "c_call" and not self.refused and self._is_of_user(frame):
            self._call(called)

    def _home(self, frame: types.FrameType) -> str:
        """Whose code it is that runs: "user", "library" of somebody else, "python", or "torch", with ours and numpy."""
        code = frame.f_code
        if code not in self._homes:
            module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if module in ("torch", "numpy", "magis") or module in _QUIET:
                home = "torch"
            elif module in SYSTEM:
                home = "python"
            else:
                home = "library" if "-packages" in code.co_filename else "user"
            self._homes[code] = home
        return self._homes[code]

    def _is_of_user(self, frame: types.FrameType) -> bool:
        caller: types.FrameType | None = frame
        while caller is not None and self._home(caller) == "python":
            caller = caller.f_back
        return caller is not None and self._home(caller) == "user"

    def _call(self, called: Any) -> None:
        name, owner = str(getattr(called, "__name__", "")), getattr(called, "__self__", None)
        of_module = owner is None or isinstance(owner, types.ModuleType)
        kind = owner if isinstance(owner, type) else type(owner)
        home = (
            str(getattr(called, "__module__", None) or getattr(owner, "__name__", "")) if of_module else kind.__module__
        )
        home = home.partition(".")[0].lstrip("_")
        if is_of_torch(home) or name in _HARMLESS or home not in _PYTHONS:
            if not (is_of_torch(home) and of_module and name.lstrip("_").startswith(("is_", "get_"))):
                return
        elif home in _SAFE and name not in _REFUSED:
            return
        if of_module and name.startswith(("is", "get")) and _answers(called):
            self.asked[f"{home}.{name}()"] = called
        elif not is_of_torch(home):
            self.refused = f"{home}.{name}" if of_module else f"{name} of a {kind.__module__}.{kind.__qualname__}"


_PYTHONS = frozenset(name.lstrip("_") for name in sys.stdlib_module_names) | {"torch"}


def _answers(called: Callable[[], Any]) -> bool:
    try:
        called()
    except Exception:  # noqa: BLE001 (it wants arguments, or has no answer now)
        return False
    return True


def _put_forward(clock: Callable[[], Any], later: int, thread: int) -> Any:
    """Other threads, and the records of logs, see the time as it is."""
    if threading.get_ident() != thread or sys._getframe(1).f_globals is vars(logging):
        return clock()
    return clock() + later


@functools.lru_cache(maxsize=4096)
def _names_read(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names that are looked up, and strings that may be: not those that are only stored to, or counted on; those of
    globals; and the modules that are imported."""
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
    """The constants of code, those within tuples, too: names that a `match` looks at."""
    for item in items:
        if isinstance(item, (tuple, frozenset)):
            yield from _flat(item)
        else:
            yield item


_ADDS = ("+", "+=")


@functools.lru_cache(maxsize=4096)
def counting_loads(code: types.CodeType) -> frozenset[int]:
    """Offsets of the instructions that load an attribute for nothing but to store it again, with a number added."""
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
        if stores[name] == len(offsets):  # each of these is the beginning of a `+=`
            found.update(offsets)
    return frozenset(found)


def _adds(steps: list[dis.Instruction], at: int) -> bool:
    """Whether what is stored at `at` is `self.n = self.n + 1`: holder, load, constant, sum, the same holder."""
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
