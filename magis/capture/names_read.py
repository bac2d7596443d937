"""The names that a forward looks up: in the code of every function that it calls, and those given to `getattr`."""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import importlib.util
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from magis.capture.python_state import counting_loads
from magis.capture.snapshot import Reads
from magis.ops.generators import called_first
from magis.ops.python_objects import is_of_system

_BY_NAME = frozenset({"vars", "__dict__", "attrgetter", "eval", "exec", "__getattribute__"})
"""Names in code that reads attributes by names made at run time; `getattr` itself tells."""
_MODULES = frozenset({"import_module", "__import__", "modules"})
_ALWAYS = frozenset(
    {"forward", "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    | {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
    | {"_forward_hooks_always_called", "_is_full_backward_hook"}
)
_BELOW = ("magis.capture", "magis.ops", "torch._", "torch.fx", "torch.utils._")
"""Code below the forward's own: it runs operators, or watches them."""


@contextmanager
def running(codes: dict[types.CodeType, dict[str, Any]], asked: set[str]) -> Iterator[None]:
    """Collect the code of every Python function that is called, with its globals, and names that `getattr` is given.

    Garbage is not collected meanwhile: whoever is called then (`gc.callbacks`, `__del__`) is not part of the forward.
    """
    plain = {name: getattr(builtins, name) for name in ("getattr", "hasattr")}

    def called(frame: types.FrameType, event: str, _arg: object) -> None:
        if event == "call":
            codes.setdefault(frame.f_code, frame.f_globals)

    def asking(look: Callable[..., Any], item: object, name: Any, *default: Any) -> Any:
        if isinstance(name, str):
            asked.add(name)
        return look(item, name, *default)

    collecting = gc.isenabled()
    gc.disable()
    try:
        for name, look in plain.items():
            setattr(builtins, name, partial(asking, look))
        with called_first(called):
            yield
    finally:
        for name, look in plain.items():
            setattr(builtins, name, look)
        if collecting:
            gc.enable()


def reads_of(codes: Mapping[types.CodeType, dict[str, Any]], asked: Collection[str]) -> Reads:
    """What code reads that has run, with its globals, and has `asked` for further names."""
    names, user, imported, by_name = {*_ALWAYS, *asked}, {*asked}, set[str](), False
    wanted: dict[int, tuple[dict[str, Any], set[str]]] = {}
    for code, namespace in codes.items():
        module = str(namespace.get("__name__", ""))
        if module.startswith(_BELOW):
            continue
        if is_of_system(module):
            names.update(code.co_names)
            if module == "os" and "_data" in code.co_names:
                wanted[id(namespace)] = namespace, {"environ"}
            continue
        read, further = _names_read(code)
        package = str(namespace.get("__package__") or module.rpartition(".")[0])
        imported |= {importlib.util.resolve_name(name, package) for name in further if package or name[:1] != "."}
        user |= read
        by_name = by_name or not _BY_NAME.isdisjoint(code.co_names)
        anything = "globals" in code.co_names
        here = {name for name in (namespace if anything else read) if name in namespace}
        wanted.setdefault(id(namespace), (namespace, set()))[1].update(here)
    found = frozenset(names | user)
    spaces = tuple((namespace, tuple(sorted(read))) for namespace, read in wanted.values())
    every = None if by_name else found
    loaded = tuple(sorted(name for name in imported if name in sys.modules))
    return Reads(every, every, frozenset(user), spaces, loaded)


@functools.lru_cache(maxsize=4096)
def _names_read(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that are looked up, and strings that may be: not those that are only stored to, or counted on; and the
    modules that are imported."""
    counts, found, modules = counting_loads(code), set[str](), set[str]()
    steps = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    for at, one in enumerate(steps):
        if one.opname == "IMPORT_NAME":
            name = f"{'.' * (steps[at - 2].argval or 0)}{one.argval}"
            modules |= {name, name if name[0] == "." else name.partition(".")[0]}
        elif one.opname == "IMPORT_FROM" or (one.opname.startswith("LOAD_") and one.argval in code.co_names):
            found |= set() if one.offset in counts else {str(one.argval)}
    strings = {item for item in _flat(code.co_consts) if isinstance(item, str)}
    if not _MODULES.isdisjoint(code.co_names):
        modules |= {item for item in strings if item in sys.modules}
    parts = {part for item in strings for part in item.split(".") if part.isidentifier()}
    return frozenset(found | parts), frozenset(modules)


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    """The constants of code, those within tuples, too: names that a `match` looks at."""
    for item in items:
        if isinstance(item, (tuple, frozenset)):
            yield from _flat(item)
        else:
            yield item
