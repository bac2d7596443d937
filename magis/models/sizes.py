"""Checks of the sizes that a network is asked for, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeVar

from magis.errors import UsageError

__all__ = ["SizeError", "check_divides", "check_sizes", "choose"]

T = TypeVar("T")


class SizeError(UsageError):
    """A network cannot be built at the sizes asked for."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


def check_sizes(model: str, config: _Dataclass) -> None:
    """Raise SizeError unless every field of `config` that holds a size is a whole number of at least 1.

    Sizes are the fields annotated `int` or `tuple[int, ...]`.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type == "int":
            _check_one(model, field.name, value)
        elif field.type == "tuple[int, ...]":
            if not isinstance(value, tuple) or not value:
                raise SizeError(f"{model}: {field.name} must be a tuple of whole numbers, not {value!r}")
            for item in value:
                _check_one(model, field.name, item)


def _check_one(model: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SizeError(f"{model}: {name} must be a whole number of at least 1, not {value!r}")


def check_divides(model: str, what: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise SizeError unless `divisor` divides `value`."""
    if value % divisor:
        raise SizeError(f"{model}: {what} must be a multiple of {divisor_name} = {divisor}, not {value}")


def choose(model: str, what: str, table: Mapping[str, T], key: object) -> T:
    """`table[key]`; raises SizeError that lists the choices."""
    if not isinstance(key, str) or key not in table:
        raise SizeError(f"{model}: unknown {what} {key!r}", hint=f"choose one of {', '.join(table)}")
    return table[key]
