"""A CaseResult as plain JSON types and back, so that it can travel between processes and into reports."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from magis.errors import UsageError
from magis.results import CaseResult

__all__ = ["from_plain", "to_plain"]


def to_plain(result: CaseResult) -> dict[str, Any]:
    """`result` as nested dictionaries of str, int, float, bool and None; `from_plain` gives an equal one back."""
    return dataclasses.asdict(result)


def from_plain(data: Mapping[str, Any]) -> CaseResult:
    """The CaseResult that `to_plain` wrote as `data`, also after JSON. Raises UsageError for anything else."""
    built = _build(CaseResult, data, "result")
    if not isinstance(built, CaseResult):  # a Mapping always builds one; this tells the type checker
        raise UsageError("result: not a case's result")
    return built


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`: a record, an optional one, a dictionary, a tuple of any length, or a plain value."""
    if isinstance(kind, types.UnionType):
        return _build_union(kind, value, where)
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


def _build_union(kind: types.UnionType, value: Any, where: str) -> Any:
    if value is None and type(None) in kind.__args__:
        return None
    (only,) = (option for option in kind.__args__ if option is not type(None))
    return _build(only, value, where)


def _build_record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: expected a record, found {type(value).__name__}")
    hints = typing.get_type_hints(kind)
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
