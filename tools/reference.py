"""Writes docs/api.md, the reference of what is public, from signatures and docstrings.

    .venv/bin/python tools/reference.py [--check]

With --check nothing is written; exit code 1 if the page is not what would be written.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from pages import write_or_check

MODULES = ("magis", "magis.api", "magis.results")
HEAD = """# API reference

```console
$ python -c "import magis; help(magis.optimize)"
```

Written by `tools/reference.py` from the code; a test keeps it true. The gate's options are in
[options](options.md), how-tos in [gate-my-model](gate-my-model.md), [optimize](optimize.md), [compile](compile.md),
[checkpoint-policy](checkpoint-policy.md), [trainers](trainers.md), [fit](fit.md), [report](report.md), [ci](ci.md),
[against](against.md), [profiles](profiles.md) and [extending](extending.md). Sizes are bytes, times milliseconds unless
a name says otherwise; every ratio is optimized / original.
"""


def page() -> str:
    """The whole page."""
    seen: set[int] = set()
    parts = [HEAD]
    for name in MODULES:
        module = import_module(name)
        parts.append(f"\n## `{name}`\n")
        for public in module.__all__:
            found = getattr(module, public)
            if id(found) in seen or isinstance(found, str):
                continue
            seen.add(id(found))
            parts.extend(_entry(public, found))
    parts.append("\n## The fixture `magis`\n")
    parts.extend(_entry("check", _fixture().check))
    parts.append("\n## Hooks of the plugin\n")
    hooks = import_module("pytest_magis.hookspecs")
    for hook, function in vars(hooks).items():
        if hook.startswith("pytest_magis_"):
            parts.extend(_entry(hook, function))
    return "".join(parts)


def _fixture() -> Any:
    """The class of what the fixture `magis` hands to a test."""
    module = import_module("pytest_magis.live.fixture")
    (found,) = (each for each in vars(module).values() if inspect.isclass(each) and hasattr(each, "check"))
    return found


def _entry(name: str, found: Any) -> Iterator[str]:
    """Heading, signature and docstring of a function or class; of a class its fields and public methods, too."""
    yield f"\n### `{name}`\n\n```python\n{_head(name, found)}\n```\n"
    yield _prose(found)
    if not inspect.isclass(found) or issubclass(found, Exception):
        return
    if dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield f"* `{field.name}`: `{_type(field.type)}`\n"
    for method, function in vars(found).items():
        if method.startswith("_") and method != "__call__":
            continue
        if inspect.isfunction(function):
            yield f"\n`{_head(method, function, one_line=True)}`\n{_prose(function)}"
        elif isinstance(function, property):
            yield f"\n`{method}`\n{_prose(function)}"


def _head(name: str, found: Any, *, one_line: bool = False) -> str:
    """A signature; with a line for each argument where it is long."""
    kind = "class" if inspect.isclass(found) else "def"
    if inspect.isclass(found) and (dataclasses.is_dataclass(found) or issubclass(found, Exception)):
        return f"class {name}"
    signature = inspect.signature(found)
    arguments = [_argument(each) for each in signature.parameters.values() if each.name != "self"]
    if any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in signature.parameters.values()) and not any(
        each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature.parameters.values()
    ):
        first = next(
            number
            for number, each in enumerate(e for e in signature.parameters.values() if e.name != "self")
            if each.kind is inspect.Parameter.KEYWORD_ONLY
        )
        arguments.insert(first, "*")
    result = (
        ""
        if signature.return_annotation in (inspect.Signature.empty, None, "None")
        else (f" -> {_type(signature.return_annotation)}")
    )
    if kind == "class":
        result = ""
    line = f"{kind} {name}({', '.join(arguments)}){result}"
    if one_line or len(line) <= 100:
        return line
    lines = "".join(f"    {each},\n" for each in arguments)
    return f"{kind} {name}(\n{lines}){result}"


def _argument(each: inspect.Parameter) -> str:
    mark = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(each.kind, "")
    annotation = "" if each.annotation is inspect.Parameter.empty else f": {_type(each.annotation)}"
    value = "..." if callable(each.default) else repr(each.default)  # a function's address is no information
    default = "" if each.default is inspect.Parameter.empty else f" = {value}"
    return f"{mark}{each.name}{annotation}{default}"


def _type(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, type):
        return annotation.__name__
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", str(annotation).replace("typing.", ""))


def _prose(found: object) -> str:
    text = inspect.getdoc(found) or ""
    if text.startswith(f"{getattr(found, '__name__', '')}("):  # a dataclass without a docstring has its signature
        text = ""
    plain = text.replace("``", "`")
    return f"\n{plain}\n\n" if plain else "\n"


if __name__ == "__main__":
    sys.exit(write_or_check("api.md", page, __doc__))
