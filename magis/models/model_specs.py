"""Names of models, and the factories that build them.

Imports torch only to build a model; names are checked without it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from magis import registry
from magis.errors import FactoryError, MagisError, UsageError, nearest

if TYPE_CHECKING:
    from magis.capture.workload import Workload

__all__ = [
    "PRESETS", "ModelSpec", "Networks", "UnknownModelError", "all_names", "check_name", "factory_default",
    "from_factory", "from_function", "get", "is_factory", "resolve",
]  # fmt: skip


class UnknownModelError(UsageError):
    """No registered model has that name or matches that pattern."""


def all_names() -> tuple[str, ...]:
    """Return the names of all installed networks."""
    return tuple(name for networks in registry.present("networks") for name in networks.names)


def is_factory(name: str) -> bool:
    """Return True if `name` has the form "package.module:factory"; else it is a registered name or a glob."""
    return ":" in name


def check_name(name: str) -> None:
    """Raise UnknownModelError, with similar names, unless `name` is a registered network."""
    names = all_names()
    if name in names:
        return
    for row in registry.names("networks"):
        registry.load("networks", row)  # raises where a neighbour with networks is not installed
    several = _groups().get(name) or [each for each in names if fnmatchcase(each, name)]
    if several:
        raise UnknownModelError(f"{name!r} stands for {len(several)} models", hint=f"name one: {', '.join(several)}")
    path = _as_factory(name)
    close = [path] if _is_path(path) else difflib.get_close_matches(name, (*names, *_groups()), 3, 0.5)
    raise UnknownModelError(
        f"unknown model {name!r}",
        hint=f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}",
    )


def _is_path(text: str) -> bool:
    """Return True for package.module:factory, in identifiers."""
    module, _, attribute = text.partition(":")
    return all(part.isidentifier() for path in (module, attribute) for part in path.split("."))


def _as_factory(name: str) -> str:
    """Return "package.module:factory" for a dotted name or a path to a file; empty for other names."""
    path, _, attribute = name.replace("::", ":").partition(":")
    parts = [part for part in path.removesuffix(".py").replace("/", ".").split(".") if part]
    if not attribute and not path.endswith(".py") and len(parts) > 1:
        attribute = parts.pop()
    named = attribute or path.endswith(".py")
    return f"{'.'.join(parts)}:{attribute or 'FACTORY'}" if named else ""


def _groups() -> dict[str, tuple[str, ...]]:
    return {name: each for networks in registry.present("networks") for name, each in networks.groups.items()}


def resolve(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the models that `patterns` select, in order, without duplicates.

    A pattern is "all" or "seed" (the gate's networks or their seed variants), a registered name, a glob over registered
    names, or "package.module:factory", which is returned unchanged (imported only to build it). Raises
    UnknownModelError for a name or a glob without a match, UsageError for a malformed factory.
    """
    return tuple(dict.fromkeys(name for pattern in patterns for name in _names_of_pattern(pattern.strip())))


def _names_of_pattern(pattern: str) -> Iterator[str]:
    if is_factory(pattern):
        if not _is_path(pattern):
            meant = _as_factory(pattern)
            hint = f"did you mean {meant}?" if _is_path(meant) else "write it as package.module:factory"
            raise UsageError(f"not a model factory: {pattern!r}", hint=hint)
        yield pattern
    elif pattern in (groups := _groups()):
        yield from groups[pattern]
    elif any(letter in pattern for letter in "*?["):
        found = [name for name in all_names() if fnmatchcase(name, pattern)]
        if not found:
            raise UnknownModelError(f"no model matches {pattern!r}", hint=f"known are {', '.join(all_names())}")
        yield from found
    else:
        check_name(pattern)
        yield pattern


PRESETS = ("paper", "small")


@dataclass(frozen=True)
class ModelSpec:
    """A model: its factory, and the data types of the paper's experiments."""

    name: str
    variant: str
    """Variant: "real" or "seed"; "real" for a user's factory."""
    build: Callable[[str, int], Workload]
    """Factory `build(preset, seed)` with preset "paper" or "small", which also works under `FakeTensorMode`.

    Equal seeds give equal weights and batches; the global generator's state is restored. A user's factory ignores the
    preset. Tensors are float32 (a user's factory: any dtype): the caller converts.
    """
    dtype: str = "float32"
    """Default data type to convert to; empty for a user's factory: no conversion."""
    paper_dtype: str = "float32"
    """Default data type to convert to with preset "paper"."""


@dataclass(frozen=True)
class Networks:
    """Named networks of a neighbour or another package (registry kind "networks")."""

    names: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    """Group name -> names of networks, such as "all"."""
    spec: Callable[[str], ModelSpec]
    """Function that returns the model of a name."""


def get(name: str, keywords: Mapping[str, int] | None = None) -> ModelSpec:
    """Return the model of a network's name, or of "package.module:factory", called with `keywords`. Raises
    UnknownModelError, with similar names, and the errors of `from_factory`."""
    if is_factory(name):
        return from_factory(name, keywords)
    check_name(name)
    networks: Iterator[Networks] = registry.present("networks")
    return next(each.spec(name) for each in networks if name in each.names)


def from_factory(path: str, keywords: Mapping[str, int] | None = None) -> ModelSpec:
    """Return the model of a user's factory, "package.module:factory".

    The factory is a callable without arguments (except `keywords`) that returns a Workload, or a tuple (module, inputs,
    targets, loss function), trained with plain SGD, lr 1e-3. The module is imported now, the factory called at each
    build. Raises UsageError in one line if the module cannot be imported or the attribute is missing or not callable;
    the build raises it if the factory fails or returns anything else.
    """
    build = partial(_build_factory, path, _load_factory(path), keywords or {})
    return ModelSpec(name=path, variant="real", build=build, dtype="", paper_dtype="")


def factory_default(path: str, keyword: str) -> int | None:
    """Return the default of a factory's keyword; None if it is no positive int. Raises UsageError if the factory lacks
    that keyword, and the errors of `from_factory`."""
    try:
        parameters = inspect.signature(_load_factory(path)).parameters
    except (TypeError, ValueError):  # a callable that does not say
        return None
    if keyword not in parameters:
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            return None
        raise UsageError(f"{path} takes no keyword {keyword!r}", hint=f"it takes {', '.join(parameters) or 'none'}")
    default = parameters[keyword].default
    return default if type(default) is int and default > 0 else None


def _load_factory(path: str) -> Callable[..., object]:
    resolve([path])
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = import_module(module_name)
    except SystemExit as error:  # a script without `if __name__ == "__main__"`, say
        raise UsageError(
            f"{path}: importing {module_name} called exit ({_reason_of(error)})",
            hint='put what a script does under `if __name__ == "__main__":`',
        ) from error
    except Exception as error:
        # the user's module may raise anything while it is imported; the chain keeps their traceback
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        hint = "start in the directory that holds it, or install it" if absent else ""
        if absent and module_name.endswith(".py"):
            hint = f"did you mean {_as_factory(path)}?"
        raise UsageError(f"{path}: cannot import {module_name}: {_reason_of(error)}", hint=hint) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            named = getattr(found, "__dict__", {})
            own = [name for name, each in named.items() if getattr(each, "__module__", "") == module_name]
            hint = nearest(part, own) if own else "define it there"
            raise UsageError(f"{path}: {module_name} has no attribute {attribute!r}", hint=hint)
        found = getattr(found, part)
    if not callable(found):
        what = f"{path}: {attribute} is a {type(found).__name__}, not a callable that returns a workload"
        raise UsageError(what, hint=f"write a function: def {attribute}(): return module, (inputs, targets), loss_fn")
    factory: Callable[..., object] = found
    return factory


def from_function(name: str, function: Callable[[], object], optimizer: object = None) -> Callable[[int], Workload]:
    """Return a factory (seed -> Workload) from a user's test function, which returns what `as_workload` accepts and
    whose errors are raised unchanged. `optimizer` is the update if the function returns none."""

    def build(seed: int) -> Workload:
        from magis.models.custom import as_workload, seeded

        with seeded(seed):
            return as_workload(name, function(), optimizer, who="the test")

    return build


def _build_factory(
    path: str,
    factory: Callable[..., object],
    keywords: Mapping[str, int],
    preset: str,  # noqa: ARG001
    seed: int,
) -> Workload:
    from magis.models.custom import as_workload, seeded

    with suppress(ValueError):  # a callable that does not say
        try:
            inspect.signature(factory).bind(**keywords)
        except TypeError as error:
            hint = "give them defaults, or name a function that calls it with them"
            raise FactoryError(f"{path}: the factory needs arguments: {error}", hint=hint) from error
    with seeded(seed):
        try:
            made = factory(**keywords)
        except MagisError:
            raise
        except SystemExit as error:
            raise FactoryError(f"{path}: the factory called exit ({_reason_of(error)})") from error
        except Exception as error:
            raise FactoryError(f"{path}: the factory failed: {_reason_of(error)}") from error
    return as_workload(path, made)


def _reason_of(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
