"""The code that a step runs, its calls of C functions, and the process state that it reads.

Values that code finds by name are watched (`magis.capture.snapshot`). A C function may read other state: files, clocks,
locks, settings of the process. Those that a user's own code calls, directly or through Python's standard library, must
be functions of their arguments alone, or are watched by calling them again, or are refused. Third-party libraries are
trusted: they log, and read clocks for the log.
"""

from __future__ import annotations

import builtins
import gc
import importlib.util
import linecache
import logging
import operator
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from magis.capture.names_in_code import Reads, matches_by_position, names_read
from magis.capture.python_state import objects_of
from magis.errors import CaptureError
from magis.ops.generators import called_first
from magis.ops.python_objects import MISSING, SYSTEM, cell_content, is_of_system, package

_ELSEWHERE = {
    "time": """
        time monotonic perf_counter process_time thread_time clock_gettime time_ns monotonic_ns perf_counter_ns
        process_time_ns thread_time_ns clock_gettime_ns localtime gmtime ctime asctime strftime
    """,
    "datetime": "datetime date now today utcnow",
    "resource": "getrusage",
    "posix": "times getloadavg",
    "builtins": "id hash",
}
"""Clocks and addresses, as used by logs and dictionary keys. They are shifted in the second call of a step, which shows
if the step computes with them."""
_HOMES = (*_ELSEWHERE, "io", "os", "timeit")
_OF_A_TIME = {time.localtime: 0, time.gmtime: 0, time.ctime: 0, time.asctime: 0, time.strftime: 1}
"""Functions of a time that defaults to now, and the number of arguments before it."""
_AS_TEXT, _ADDRESSES = (time.asctime, time.strftime), (id, hash)
_OPEN, _NOW = open, time.time
LATER = 86_400 * 365
"""Seconds by which a clock is advanced at every read."""
_QUIET = frozenset({"logging", "warnings", "traceback", "importlib", "tokenize", "pdb", "contextlib"})
"""Parts of Python's standard library whose reads of process state affect no number of a step."""
_SAFE = frozenset({
    "builtins", "math", "cmath", "operator", "itertools", "functools", "collections", "re", "struct", "random",
    "copyreg", "typing", "abc", "weakref", "array", "decimal", "datetime", "fractions", "statistics", "bisect", "heapq",
    "json", "sre", "string", "codecs", "csv", "pickle", "zlib", "binascii", "hashlib", "sha1", "sha2", "sha256",
    "sha512", "md5", "blake2", "contextvars", "locale", "ast", "opcode", "symtable", "inspect", "types", "enum",
    "unicodedata", "ctypes", "stat", "tracemalloc", "copy", "asyncio", "imp", "warnings",
})  # fmt: skip
"""Python's modules whose functions and methods depend only on state that others watch."""
_HARMLESS = frozenset({
    "sleep", "fspath", "fsencode", "fsdecode", "getpid", "exc_info", "_getframe", "intern", "getsizeof", "exit",
    "write", "writelines", "flush", "close", "acquire", "release", "__enter__", "__exit__", "collect", "putenv",
    "unsetenv", "audit", "StringIO", "BytesIO", "getvalue", "get_objects", "get_referrers", "notify", "put",
    "allocate_lock", "RLock",
})  # fmt: skip
"""Functions of other modules whose results are constant, or do not influence the numbers of a step."""
_REFUSED = frozenset({"open", "input", "locked"})
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
"""Functions that read settings of operators, properties and Python's library, by a name in code or a called module."""

_BY_NAME = frozenset({"vars", "dir", "__dict__", "attrgetter", "eval", "exec", "__getattribute__"})
"""Names in code that reads attributes by computed names; `getattr` itself is recorded."""
_ANY_NAME = frozenset(map(id, (getattr, hasattr, vars, dir, operator.attrgetter)))
_WHOLE = frozenset({"__reduce__", "__reduce_ex__", "__getstate__", "__dir__", "__sizeof__"})
_WHOLE_MODULES = frozenset({"argparse", "copy", "copyreg", "pickle", "pprint", "reprlib"})
"""Functions (under any name), methods and modules that read attributes whose names appear in no code."""
_ALWAYS = frozenset(
    {"forward", "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    | {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
    | {"_forward_hooks_always_called", "_is_full_backward_hook"}
    | {"_backward_fn", "_setup_context_fn", "_backends_to_fns"}  # of custom operators
)
_BELOW = ("magis.capture", "magis.ops", "magis.cases.tensor_ledger", "torch._", "torch.fx", "torch.utils._")
"""Modules that run or watch operators below the forward's own code."""


def unwatched(called: str) -> CaptureError:
    """Return the error for a step that computes with the result of a call that cannot be watched."""
    return CaptureError(
        f"the step calls {called}, and nobody sees when its result changes",
        hint="call it before the step, and keep the number or a tensor in an attribute",
    )


class Ran:
    """The code that ran in a block, and the process state that it read."""

    def __init__(self, later: int = LATER) -> None:
        self.codes: dict[types.CodeType, dict[str, Any]] = {}
        """Globals of each code object that ran."""
        self.names: set[str] = set()
        """Names given to `getattr` and `hasattr`."""
        self.asked: dict[str, Callable[[], Any]] = {}
        self.reads_any = False
        """True once attributes are read by names that appear in no code: then all attributes are watched."""
        self.refused = ""
        self.looked = ""
        """The clock or address that the second call read last; empty if none."""
        self._later, self._looks, self._again, self._thread = later, 0, False, 0
        self._cells: dict[types.CodeType, set[tuple[int, ...]]] = {}
        self._functions: dict[frozenset[types.CodeType], tuple[types.FunctionType, ...]] = {}
        self._modules: set[str] = set()
        self._homes: dict[types.CodeType, str] = {}

    def check(self) -> None:
        """Raise CaptureError for a call that cannot be watched."""
        if self.refused:
            raise unwatched(self.refused)

    @contextmanager
    def listening(self, *, again: bool = False) -> Iterator[None]:
        """Record the code of every Python function that is called; ``again`` for the second call of a step, in which
        clocks and addresses are shifted. The garbage collector is off meanwhile, as its callbacks and `__del__` are no
        part of the step."""
        self._again, self._looks, self._thread = again, 0, threading.get_ident()
        new: dict[int, Any] = {id(each): partial(self._asking, each) for each in (getattr, hasattr)}
        new[id(_OPEN)] = self._opening
        for module, names in _ELSEWHERE.items() if again else ():
            found = (getattr(sys.modules.get(module), name, None) for name in names.split())
            for item in found:
                if isinstance(item, (types.BuiltinFunctionType, type)):
                    new[id(item)] = self._dates(item) if isinstance(item, type) else partial(self._elsewhere, item)
        homes = [vars(sys.modules[name]) for name in _HOMES if name in sys.modules]
        theirs = [space for code, space in self.codes.items() if code in self._cells]
        spaces = {id(space): space for space in (*homes, *theirs)}
        replaced = [
            (space, name, value) for space in spaces.values() for name, value in space.items() if id(value) in new
        ]
        collecting = gc.isenabled()
        gc.disable()
        try:
            for space, name, value in replaced:
                space[name] = new[id(value)]
            with called_first(self._hear):
                yield
        finally:
            for space, name, value in replaced:
                space[name] = value
            if collecting:
                gc.enable()

    def reads(self) -> Reads:
        """Return the names that the recorded code looks up."""
        names, user, imported, by_name = {*_ALWAYS, *self.names}, {*self.names}, set[str](), self.reads_any
        wanted: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, namespace in self.codes.items():
            module = str(namespace.get("__name__", ""))
            if module.startswith(_BELOW):
                continue
            if is_of_system(module):
                by_name = by_name or module in _WHOLE_MODULES
                names.update(code.co_names)
                if module == "os" and "_data" in code.co_names:
                    wanted[id(namespace)] = namespace, {"environ"}
                continue
            read, bare, further = names_read(code)
            package = str(namespace.get("__package__") or module.rpartition(".")[0])
            imported |= {importlib.util.resolve_name(name, package) for name in further if package or name[:1] != "."}
            user |= read
            by_name = by_name or not _BY_NAME.isdisjoint(code.co_names) or matches_by_position(code)
            by_name = by_name or not _ANY_NAME.isdisjoint(map(id, map(namespace.get, bare)))
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
        """Return the live functions with these code objects that ran; searches all objects of the process."""
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
        """Return the settings that the step read, and those that code reads by these names."""
        known = {*names, *self._modules}
        return (*self.asked.items(), *((name, ask) for name, ask in _NAMED.items() if name in known))

    # -- while the block runs------------------------------------------------------------------------------------

    def _asking(self, look: Callable[..., Any], item: object, name: Any, *default: Any) -> Any:
        if isinstance(name, str):
            self.names.add(name)
        return look(item, name, *default)

    def _opening(self, file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        """Open a file; record a refusal if the step's own code opens it for reading."""
        if not {*"r+"}.isdisjoint(mode) and self._is_asked_by(sys._getframe(1)):
            self.refused = self.refused or "open"
        return _OPEN(file, mode, *more, **named)

    def _elsewhere(self, look: Callable[..., Any], *given: Any) -> Any:
        """Read a clock that is advanced, or a shifted address, if the step's own code reads it."""
        found, before = look(*given), _OF_A_TIME.get(look)
        if not self._is_asked_by(sys._getframe(1)) or (look in _ADDRESSES and not _is_address(look, *given)):
            return found
        name = f"{look.__module__}.{look.__name__}".removeprefix("builtins.")
        if before is not None:
            if given[before : before + 1] in ((), (None,)):
                then = _NOW() + self._ahead(name)
                found = look(*given[:before], time.localtime(then) if look in _AS_TEXT else then)
            return found
        ahead = self._ahead(name) * (10**9 if name.endswith("_ns") else 1)
        if look in _ADDRESSES:
            return found + self._later
        return type(found)([each + ahead for each in found]) if isinstance(found, tuple) else found + ahead

    def _is_asked_by(self, frame: types.FrameType) -> bool:
        """Return True if the step's own code calls, on the recorded thread."""
        return threading.get_ident() == self._thread and self._is_of_user(frame)

    def _ahead(self, name: str) -> int:
        """Return the seconds by which the clock that is read next is advanced."""
        self.looked, self._looks = name, min(self._looks + 1, 1000)
        return self._later * self._looks

    def _dates(self, kind: Any) -> Any:
        """Return a replacement for a class of dates, whose `now` and `today` are advanced."""

        def later(name: str) -> Any:
            look: Callable[..., Any] = getattr(kind, name)

            def ahead(*given: Any, **named: Any) -> Any:
                of_user = self._is_asked_by(sys._getframe(1))
                return look(*given, **named) + timedelta(seconds=self._ahead(name) if of_user else 0)

            return staticmethod(ahead)

        checks = {"__instancecheck__": isinstance, "__subclasscheck__": issubclass}
        own = {name: lambda _, item, check=check: check(item, kind) for name, check in checks.items()}
        meta: Any = type("meta", (type,), own)
        names = [name for name in ("now", "today", "utcnow") if hasattr(kind, name)]
        return meta(kind.__name__, (kind,), {name: later(name) for name in names})

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
            self._note_call(called)

    def _home(self, frame: types.FrameType) -> str:
        """Return the origin of running code: "user", "library" (third-party), "python", or "torch" (with numpy and
        magis)."""
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

    def _note_call(self, called: Any) -> None:
        name, owner = str(getattr(called, "__name__", "")), getattr(called, "__self__", None)
        if name in ("format", "format_map") and isinstance(owner, str):
            self.names.update(part for part in re.split(r"\W", owner) if part.isidentifier())
        self.reads_any = self.reads_any or id(called) in _ANY_NAME or name in _WHOLE
        of_module = owner is None or isinstance(owner, types.ModuleType)
        kind = owner if isinstance(owner, type) else type(owner)
        of = getattr(called, "__module__", None) or getattr(owner, "__name__", "") if of_module else kind
        home = package(of).lstrip("_")
        self.reads_any = self.reads_any or home in _WHOLE_MODULES
        if name in _ELSEWHERE.get(home, "").split() and home != "builtins":  # other reads were shifted in their module
            self.refused = f"{home}.{name}" if self._again else ""
            return
        if home == "torch" or name in _HARMLESS or home not in _PYTHONS:
            if not (home == "torch" and of_module and name.lstrip("_").startswith(("is_", "get_"))):
                return
        elif home in _SAFE and name not in _REFUSED:
            return
        if of_module and name.startswith(("is", "get")) and _answers(called):
            self.asked[f"{home}.{name}()"] = called
        elif home != "torch":
            self.refused = f"{home}.{name}" if of_module else f"{name} of a {kind.__module__}.{kind.__qualname__}"


_PYTHONS = frozenset(name.lstrip("_") for name in sys.stdlib_module_names) | {"torch"}


def _answers(called: Callable[[], Any]) -> bool:
    try:
        called()
    except Exception:  # noqa: BLE001 (it wants arguments, or has no answer now)
        return False
    return True


def _is_address(look: Callable[..., Any], item: object = None, *_: object) -> bool:
    """Return True for the address of an object that may die: modules and parameters are watched while they live."""
    own = look is _ADDRESSES[0] or type(item).__hash__ in (object.__hash__, torch.Tensor.__hash__)
    return own and not isinstance(item, (torch.nn.Module, torch.nn.Parameter))
