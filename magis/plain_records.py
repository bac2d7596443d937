"""Conversion of frozen dataclasses to plain JSON types and back, for files and messages between processes.

Fields may be str, int, float, bool, records, tuples of any length, dictionaries, and any of these types or None. Fields
with a default may be missing; unknown fields raise UsageError.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from magis.errors import UsageError

__all__ = ["LARGEST_COUNT", "from_plain", "read_json", "short", "to_plain"]

R = TypeVar("R")
LARGEST_COUNT = 2**63 - 1
_EXPECTED = {bool: "true or false", float: "a number", int: "a whole number", str: "text"}
_COUNTS = {float: "a positive number", int: f"a whole number from 0 to {LARGEST_COUNT}"}


def read_json(text: str) -> Any:
    """Parse JSON. Raises UsageError for invalid JSON, a key that occurs twice in an object, and NaN or infinity."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise UsageError("nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"not valid JSON: {error}") from None


def to_plain(record: Any) -> dict[str, Any]:
    """Return a dataclass instance as nested dictionaries of plain values; `from_plain` is the inverse."""
    return dataclasses.asdict(record)


def from_plain(kind: type[R], data: object, where: str = "record", *, counts: bool = False) -> R:
    """Return an instance of the dataclass `kind` from the dictionaries that `to_plain` returns, before or after JSON.

    With `counts`, ints must be from 0 to `LARGEST_COUNT` and floats above 0. Raises UsageError for any other value,
    with the field's name behind the prefix `where`.
    """
    built: R = _build(kind, data, where, counts=counts)
    return built


def short(value: object) -> str:
    """Return a short text of a value for a message: untrusted values can be megabytes, or huge integers."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_COUNT:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_hints = lru_cache(maxsize=64)(typing.get_type_hints)


def _build(kind: Any, value: Any, where: str, *, counts: bool) -> Any:
    """Convert a value to a field's type: plain value, optional, record, dictionary or tuple."""
    if kind in _EXPECTED:
        # JSON knows no difference between 1.0 and 1; a bool is no number
        if kind is float and type(value) is int and abs(value) <= LARGEST_COUNT:
            value = float(value)
        fits = type(value) is kind and not (counts and kind is int and not 0 <= value <= LARGEST_COUNT)
        if not fits or (counts and kind is float and not 0 < value <= LARGEST_COUNT):
            wanted = _COUNTS[kind] if counts and kind in _COUNTS else _EXPECTED[kind]
            raise UsageError(f"{where}: expected {wanted}, found {short(value)}")
        return value
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (only,) = (option for option in kind.__args__ if option is not type(None))
        return _build(only, value, where, counts=counts)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise UsageError(f"{where}: expected a list, found {short(value)}")
        (item_kind, _) = typing.get_args(kind)
        return tuple(_build(item_kind, item, f"{where}[{index}]", counts=counts) for index, item in enumerate(value))
    if not isinstance(value, Mapping):
        raise UsageError(f"{f'{where}: ' if where else ''}expected an object, found {short(value)}")
    if typing.get_origin(kind) is not None:
        key_kind, item_kind = typing.get_args(kind)
        keys = [_build(key_kind, key, where, counts=counts) for key in value]
        items = [_build(item_kind, item, f"{where}[{short(key)}]", counts=counts) for key, item in value.items()]
        return dict(zip(keys, items, strict=True))
    hints = _hints(kind)
    # where both are MISSING
    needed = {each.name for each in dataclasses.fields(kind) if each.default is each.default_factory}
    for text, names in (("{} is missing", needed - value.keys()), ("unknown entry {}", value.keys() - hints.keys())):
        if names:
            raise UsageError(f"{f'{where}: ' if where else ''}{text.format(short(min(names)))}")
    inside = f"{where}." if where else ""
    built = {name: _build(hints[name], item, f"{inside}{name}", counts=counts) for name, item in value.items()}
    return kind(**built)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):  # as a badly resolved merge leaves it: which of the two holds?
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {short(twice)} occurs twice")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
