"""Names of models, as users may write them, and the recipes that build them.

Imports torch only when something is built: start-up checks names.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from magis import registry
from magis.errors import FactoryError, MagisError, UsageError

if TYPE_CHECKING:
    from magis.capture.workload import Workload

__all__ = [
    "PRESETS", "ModelSpec", "Networks", "UnknownModelError", "all_names", "check_name", "factory_default",
    "from_factory", "from_function", "get", "is_factory", "resolve",
]  # fmt: skip


class UnknownModelError(UsageError):
    """No registered model has that name, or no name matches that pattern."""


def all_names() -> tuple[str, ...]:
    """List the names of the networks that are installed."""
    return tuple(name for networks in registry.present("networks") for name in networks.names)


def is_factory(name: str) -> bool:
    """Return True if `name` is written as "package.module:factory" rather than as a registered name or a glob."""
    return ":" in name


def check_name(name: str) -> None:
    """Raise UnknownModelError, with the closest names, unless `name` is that of a network."""
    names = all_names()
    if name in names:
        return
    for row in registry.names("networks"):
        registry.load("networks", row)  # raises where a neighbour with networks is not installed
    close = difflib.get_close_matches(name, (*names, *_groups()), n=3, cutoff=0.5)
    raise UnknownModelError(
        f"unknown model {name!r}",
        hint=f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}",
    )


def _groups() -> dict[str, tuple[str, ...]]:
    return {name: each for networks in registry.present("networks") for name, each in networks.groups.items()}


def resolve(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the models that `patterns` ask for, in the order written, each once.

    A pattern is "all" or "seed" (the gate's networks or their seed variants), a registered name, a glob over the
    registered names, or "package.module:factory", which is passed through (it is imported only when built). Raises
    UnknownModelError for a name or a glob that matches nothing, UsageError for a malformed factory.
    """
    return tuple(dict.fromkeys(name for pattern in patterns for name in _names_of_pattern(pattern.strip())))


def _names_of_pattern(pattern: str) -> Iterator[str]:
    if is_factory(pattern):
        module, _, attribute = pattern.partition(":")
        if not all(part.isidentifier() for path in (module, attribute) for part in path.split(".")):
            raise UsageError(f"not a model factory: {pattern!r}", hint="write it as package.module:factory")
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
    """A model that can be built, and how the paper ran it."""

    name: str
    variant: str
    """ "real" or "seed"; a user's own factory counts as "real"."""
    build: Callable[[str, int], Workload]
    """`build(preset, seed)` with preset "paper" or "small", under `FakeTensorMode` or not.

    The same seed gives the same weights and batch; the global generator is left as it was. A factory
    ignores the preset. Always float32, but for a factory's: the caller converts.
    """
    dtype: str = "float32"
    """Data type to convert to where nothing else is asked for; empty for a factory: what it makes is left as it is."""
    paper_dtype: str = "float32"
    """Data type to convert to at preset "paper"."""


@dataclass(frozen=True)
class Networks:
    """Networks under names, as a neighbour or another package offers them (registry kind "networks")."""

    names: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    """Names that stand for several networks, as "all" does."""
    spec: Callable[[str], ModelSpec]
    """Function from one of the names to its network."""


def get(name: str, keywords: Mapping[str, int] | None = None) -> ModelSpec:
    """Return the model called `name`, a network's or "package.module:factory"; `keywords` are for the factory.
    Raises UnknownModelError, naming the closest matches, and what `from_factory` raises."""
    if is_factory(name):
        return from_factory(name, keywords)
    check_name(name)
    networks: Iterator[Networks] = registry.present("networks")
    return next(each.spec(name) for each in networks if name in each.names)


def from_factory(path: str, keywords: Mapping[str, int] | None = None) -> ModelSpec:
    """Return the model that "package.module:factory" makes.

    The factory is a callable without arguments (but for `keywords`) that returns a Workload, or a tuple (module,
    inputs, targets, loss function), which is then trained with plain SGD, lr 1e-3. The module is imported at once, the
    factory called at each build. Raises UsageError in one line when the module cannot be imported, lacks the attribute,
    the attribute is not callable; at build, when it fails or returns anything else.
    """
    build = partial(_build_factory, path, _load_factory(path), keywords or {})
    return ModelSpec(name=path, variant="real", build=build, dtype="", paper_dtype="")


def factory_default(path: str, keyword: str) -> int | None:
    """Return the default of a factory's keyword; None where that is no whole number above 0. Raises UsageError where
    the factory has no such keyword, and what `from_factory` raises."""
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
    except SystemExit as error:  # a script, say, whose work is not under `if __name__ == "__main__"`
        raise UsageError(
            f"{path}: importing {module_name} called exit ({_reason_of(error)})",
            hint='put what a script does under `if __name__ == "__main__":`',
        ) from error
    except Exception as error:
        # the user's module may raise anything while it is imported; the chain keeps their traceback
        raise UsageError(f"{path}: cannot import {module_name}: {_reason_of(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{path}: {module_name} has no attribute {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{path}: {attribute} is a {type(found).__name__}, not a callable that returns a workload")
    factory: Callable[..., object] = found
    return factory


def from_function(name: str, function: Callable[[], object], optimizer: object = None) -> Callable[[int], Workload]:
    """Return a recipe (seed -> workload) for what a user's test returns: whatever a factory may (see `as_workload`).
    Whatever the function itself raises is left as it is. `optimizer` is the update, where the function names none."""

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
