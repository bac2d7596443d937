"""Frozen dataclasses as plain JSON types and back, so that they can travel between processes and into files.

A record's fields may be str, int, float, bool, further records, tuples of any length, dictionaries, and any of these or
None. Fields with a default may be missing; unknown ones are refused.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from magis.errors import UsageError

__all__ = ["from_plain", "to_plain"]

R = TypeVar("R")


def to_plain(record: Any) -> dict[str, Any]:
    """Return a record as nested dictionaries of str, int, float, bool and None; `from_plain` is the inverse."""
    return dataclasses.asdict(record)


def from_plain(kind: type[R], data: object, where: str = "record") -> R:
    """Return the record of a kind from what `to_plain` made of it, before or after JSON.

    Raises UsageError for anything else; it names the field, with the prefix `where`.
    """
    built: R = _build(kind, data, where)
    return built


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any, where: str) -> Any:
    """Convert a value to a field's type: record, optional, dictionary, tuple of any length or plain value."""
    if isinstance(kind, types.UnionType):
        if value is None and type(None) in kind.__args__:
            return None
        (only,) = (option for option in kind.__args__ if option is not type(None))
        return _build(only, value, where)
    if dataclasses.is_dataclass(kind):
        return _build_record(kind, value, where)
    if typing.get_origin(kind) is dict:
        key_kind, value_kind = typing.get_args(kind)
        if not isinstance(value, Mapping):
            raise UsageError(f"{where}: expected a dictionary, found {type(value).__name__}")
        return {_build(key_kind, key, where): _build(value_kind, item, f"{where}.{key}") for key, item in value.items()}
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise UsageError(f"{where}: expected a list, found {type(value).__name__}")
        (item_kind, _) = typing.get_args(kind)
        return tuple(_build(item_kind, item, f"{where}[{index}]") for index, item in enumerate(value))
    # JSON knows no difference between 1.0 and 1; a bool is no number
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UsageError(f"{where}: expected {kind.__name__}, found {type(value).__name__}")
    return value


def _build_record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: expected a record, found {type(value).__name__}")
    hints = _hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise UsageError(f"{where}: unknown field {unknown[0]!r}")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(f"{where}: field {missing[0]!r} is missing")
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in value.items()})
