"""Baselines as files: `<directory>/<device>/<model>.json`, sorted, one value a line, so that a diff can be read.

A file is read as a whole or refused: anything outside the schema raises a BaselineError of one line, and the file
stays as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from magis.errors import BaselineError
from magis.report import read_regular, write_text_atomically
from pytest_magis.baselines import ModelBaseline

SCHEMA = 1
LARGEST_FILE = 16 * 1024 * 1024
LARGEST_COUNT = 2**63 - 1
LONGEST_NAME = 150

_ADVICE = "restore the file from version control, or delete it and create it anew with --magis-update=new"


def baseline_path(directory: Path, device: str, model: str) -> Path:
    """Return the file of a model on a device. Different names never share a file, and no name leaves the directory."""
    return directory / file_name(device.replace(":", "-")) / f"{file_name(model)}.json"


def read_baseline(path: Path, model: str, device: str) -> ModelBaseline | None:
    """Read the baseline in a file; None without the file. Raises BaselineError if it is not one of that model."""
    try:
        if not path.exists():
            return None
        text = read_regular(path, LARGEST_FILE)
    except UnicodeDecodeError as error:
        raise BaselineError(f"baseline {path}: not UTF-8 text at byte {error.start}", hint=_ADVICE) from error
    except OSError as error:
        raise BaselineError(f"baseline {path} cannot be read: {error.strerror or error}") from error
    baseline = parse(text, path)
    if (baseline.model, baseline.device) != (model, device):
        found = f"{_short(baseline.model)} on {_short(baseline.device)}"
        _refuse(path, f"it is of {found}, not of {model!r} on {device!r}")
    return baseline


def write_baseline(path: Path, baseline: ModelBaseline) -> None:
    """Replace the file atomically, and make its directory. Raises UsageError if it cannot be written."""
    _make_folder(path.parent)
    write_text_atomically(path, render(baseline))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder of baselines, so that no other run changes a file between reading and writing it here.

    The folder itself is locked, so that no lock file is left behind; a file system without locks has none. Raises
    BaselineError if the folder cannot be made.
    """
    _make_folder(folder)
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)  # which also unlocks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BaselineError(f"cannot make directory {folder}: {error.strerror or error}") from error


def render(baseline: ModelBaseline) -> str:
    """Write a baseline as text; `parse` is the inverse."""
    data = _without_none(asdict(baseline))
    for configuration in data["configurations"].values():
        if not configuration["held"]:
            del configuration["held"]
    return json.dumps({"schema": SCHEMA, **data}, indent=2, sort_keys=True, allow_nan=False) + "\n"


def parse(text: str, path: Path) -> ModelBaseline:
    """Read a baseline from text; `path` is for messages. Raises BaselineError for anything that is not one."""
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError as error:
        raise BaselineError(f"baseline {path}: nested too deeply", hint=_ADVICE) from error
    except ValueError as error:
        raise BaselineError(f"baseline {path}: not valid JSON: {error}", hint=_ADVICE) from error
    try:
        return _read_model(data)
    except _SchemaError as error:
        raise BaselineError(f"baseline {path}: {error}", hint=error.hint) from error


class _SchemaError(Exception):
    """Content outside the schema; the message says where in the file."""

    def __init__(self, message: str, hint: str = _ADVICE) -> None:
        super().__init__(message)
        self.hint = hint


def _read_model(data: object) -> ModelBaseline:
    record = dict(_object(data, ""))
    schema = record.pop("schema", None)
    if type(schema) is not int or schema < 1:
        raise _SchemaError(f"schema: expected {SCHEMA}, found {_short(schema)}")
    if schema > SCHEMA:
        newer = f"made by a newer version of pytest-magis (schema {_short(schema)}, this version reads {SCHEMA})"
        raise _SchemaError(newer, hint="upgrade pytest-magis")
    baseline: ModelBaseline = _read_value(ModelBaseline, record, "")
    for name, configuration in baseline.configurations.items():
        for label, case in configuration.cases.items():
            where = f"configurations[{_short(name)}].cases[{_short(label)}]"
            if case.workspaces is not None and case.workspaces not in configuration.workspaces:
                raise _SchemaError(f"{where}: no workspaces called {_short(case.workspaces)}")
            for held in (case.original_held, case.optimized_held):
                if held is not None and held not in configuration.held:
                    raise _SchemaError(f"{where}: no table of what is held called {_short(held)}")
    return baseline


def _read_value(kind: Any, value: object, where: str) -> Any:
    """Check a value against the type of its field and convert it: a plain value, a record, or a mapping."""
    if kind in _EXPECTED:
        # a bool is an int to Python, but no number in a file
        is_number = isinstance(value, (int, float)) and type(value) is not bool and 0 <= value <= LARGEST_COUNT
        if kind is float and is_number and value:  # a whole ratio may be written without its ".0"
            return float(value)  # type: ignore[arg-type]
        if kind is not float and type(value) is kind and (is_number or kind is not int):
            return value
        raise _SchemaError(f"{where}: expected {_EXPECTED[kind]}, found {_short(value)}")
    if isinstance(kind, UnionType):  # None is never written
        (only,) = (each for each in kind.__args__ if each is not NoneType)
        return _read_value(only, value, where)
    if is_dataclass(kind):
        return _read_record(kind, value, where)
    _, item = get_args(kind)
    return {key: _read_value(item, each, f"{where}[{_short(key)}]") for key, each in _object(value, where).items()}


_EXPECTED = {
    bool: "true or false",
    float: "a positive number",
    int: f"a whole number from 0 to {LARGEST_COUNT}",
    str: "text",
}


_hints = lru_cache(get_type_hints)


def _read_record(kind: Any, value: object, where: str) -> Any:
    record, hints = _object(value, where), _hints(kind)
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    # mappings are written even if they are empty; older files have no `held`
    needed |= {name for name, hint in hints.items() if get_origin(hint) is Mapping and name != "held"}
    missing, unknown = sorted(needed - record.keys()), sorted(record.keys() - hints.keys())
    prefix = f"{where}: " if where else ""
    if missing:
        raise _SchemaError(f"{prefix}{missing[0]!r} is missing")
    if unknown:
        raise _SchemaError(f"{prefix}unknown entry {_short(unknown[0])}")
    inside = f"{where}." if where else ""
    return kind(**{name: _read_value(hints[name], each, f"{inside}{name}") for name, each in record.items()})


def _object(data: object, where: str) -> dict[str, object]:
    if not isinstance(data, dict):
        raise _SchemaError(f"{f'{where}: ' if where else ''}expected an object, found {_short(data)}")
    return data


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record: dict[str, object] = {}
    for key, value in pairs:
        if key in record:  # as a badly resolved merge leaves it: which of the two holds?
            raise ValueError(f"the key {_short(key)} occurs twice")
        record[key] = value
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if value is not None
    }


def _refuse(path: Path, why: str) -> NoReturn:
    raise BaselineError(f"baseline {path}: {why}", hint=_ADVICE)


def _short(value: object) -> str:
    """Write a value from a file for a message: hostile ones can be megabytes, or numbers too long to print."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_COUNT:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def file_name(name: str) -> str:
    """Turn a name into a file's: bytes but letters, digits, "_", "-" and "." become %XX, so no two names collide."""
    encoded = "".join(
        chr(byte) if re.fullmatch(r"[A-Za-z0-9_.-]", chr(byte)) else f"%{byte:02X}"
        for byte in name.encode("utf-8", errors="surrogatepass")
    )
    if encoded.startswith("."):
        encoded = f"%2E{encoded[1:]}"
    if len(encoded) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode("utf-8", errors="surrogatepass")).hexdigest()
        encoded = f"{encoded[: LONGEST_NAME - 40]}%{digest[:39]}"
    return encoded
