"""The models' names, and what a user may write for them. Imports no torch: start-up checks names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from magis.errors import UsageError

__all__ = [
    "GATE_NAMES",
    "REAL_NAMES",
    "SEED_NAMES",
    "UnknownModelError",
    "all_names",
    "check_name",
    "is_factory",
    "resolve",
]

GATE_NAMES = ("resnet50", "bert", "vit", "unet", "unetpp", "gpt_neo", "btlm")
"""The workloads of the paper's Table 2; what "all" stands for."""

REAL_NAMES = (
    *GATE_NAMES,
    "gpt",
    "mlp",
    "resnet34",
    "resnet101",
    "resnet152",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "densenet121",
    "densenet169",
    "densenet201",
)

SEED_NAMES = tuple(f"seed-{name}" for name in GATE_NAMES)
"""The seed variants of the gate's networks; what "seed" stands for."""

_GROUPS = {"all": GATE_NAMES, "seed": SEED_NAMES}


class UnknownModelError(UsageError):
    """No registered model has that name, or no name matches that pattern."""


def all_names() -> tuple[str, ...]:
    """Every registered name: the real networks, then their seed variants."""
    return (*REAL_NAMES, *(f"seed-{name}" for name in REAL_NAMES))


def is_factory(name: str) -> bool:
    """Whether `name` is written as "package.module:factory" rather than as a registered name or a glob."""
    return ":" in name


def check_name(name: str) -> None:
    """Raise UnknownModelError, with the closest names, unless `name` is registered."""
    names = all_names()
    if name in names:
        return
    close = difflib.get_close_matches(name, (*names, *_GROUPS), n=3, cutoff=0.5)
    raise UnknownModelError(
        f"unknown model {name!r}",
        hint=f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}",
    )


def resolve(patterns: Sequence[str]) -> tuple[str, ...]:
    """The models that `patterns` ask for, in the order written, each once.

    A pattern is "all" or "seed" (the gate's networks or their seed variants), a registered name, a glob
    over the registered names, or "package.module:factory", which is passed through (it is imported only
    when built). Raises UnknownModelError for a name or a glob that matches nothing, UsageError for a
    malformed factory.
    """
    return tuple(dict.fromkeys(name for pattern in patterns for name in _matches(pattern.strip())))


def _matches(pattern: str) -> Iterator[str]:
    if is_factory(pattern):
        _check_factory(pattern)
        yield pattern
    elif pattern in _GROUPS:
        yield from _GROUPS[pattern]
    elif any(letter in pattern for letter in "*?["):
        found = [name for name in all_names() if fnmatchcase(name, pattern)]
        if not found:
            raise UnknownModelError(f"no model matches {pattern!r}", hint=f"known are {', '.join(all_names())}")
        yield from found
    else:
        check_name(pattern)
        yield pattern


def _check_factory(pattern: str) -> None:
    module, _, attribute = pattern.partition(":")
    if not all(part.isidentifier() for path in (module, attribute) for part in path.split(".")):
        raise UsageError(f"not a model factory: {pattern!r}", hint="write it as package.module:factory")
