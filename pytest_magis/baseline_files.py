"""Baselines as files: `<directory>/<device>/<model>.json`, sorted, one value a line, so that a diff can be read.

A file is believed only as a whole: whatever is not exactly of the schema is a BaselineError of one line, and the
file is left as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, NoReturn

from magis.errors import BaselineError
from magis.report import read_regular, write_text_atomically
from pytest_magis.baselines import CaseBaseline, Configuration, Measured, ModelBaseline

SCHEMA = 1
LARGEST_FILE = 16 * 1024 * 1024
LARGEST_COUNT = 2**63 - 1
LONGEST_NAME = 150

_ADVICE = "restore the file from version control, or delete it and create it anew with --magis-update=new"


def baseline_path(directory: Path, device: str, model: str) -> Path:
    """The file of a model on a device. Different names never share a file, and no name leaves the directory."""
    return directory / file_name(device.replace(":", "-")) / f"{file_name(model)}.json"


def read_baseline(path: Path, model: str, device: str) -> ModelBaseline | None:
    """The baseline in `path`, None if there is no such file. Raises BaselineError if it is not one of that model."""
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
    """Replace the file in one step, its directory made if needed. Raises UsageError if it cannot be written."""
    _make(path.parent)
    write_text_atomically(path, render(baseline))


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no other run that holds the folder changes what is in it: what is read is still there when it is written.

    The folder itself is locked, so that no file is left behind. File systems without locks do without. Raises
    BaselineError where the folder cannot be made.
    """
    _make(folder)
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)  # which also unlocks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BaselineError(f"cannot make directory {folder}: {error.strerror or error}") from error


def render(baseline: ModelBaseline) -> str:
    """The text of a baseline; `parse` reads it back."""
    data = _without_none(asdict(baseline))
    for configuration in data["configurations"].values():
        if not configuration["held"]:
            del configuration["held"]
    return json.dumps({"schema": SCHEMA, **data}, indent=2, sort_keys=True, allow_nan=False) + "\n"


def parse(text: str, path: Path) -> ModelBaseline:
    """The baseline that `text` holds; `path` is for messages. Raises BaselineError for anything that is not one."""
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError as error:
        raise BaselineError(f"baseline {path}: nested too deeply", hint=_ADVICE) from error
    except ValueError as error:
        raise BaselineError(f"baseline {path}: not valid JSON: {error}", hint=_ADVICE) from error
    try:
        return _model(data)
    except _SchemaError as error:
        raise BaselineError(f"baseline {path}: {error}", hint=error.hint) from error


class _SchemaError(Exception):
    """What is wrong, and where in the file."""

    def __init__(self, message: str, hint: str = _ADVICE) -> None:
        super().__init__(message)
        self.hint = hint


def _model(data: object) -> ModelBaseline:
    if not isinstance(data, dict):
        raise _SchemaError(f"expected an object, found {_short(data)}")
    schema = data.get("schema")
    if type(schema) is not int or schema < 1:
        raise _SchemaError(f"schema: expected {SCHEMA}, found {_short(schema)}")
    if schema > SCHEMA:
        newer = f"made by a newer version of pytest-magis (schema {_short(schema)}, this version reads {SCHEMA})"
        raise _SchemaError(newer, hint="upgrade pytest-magis")
    _check_keys(data, {"schema", "model", "device", "configurations"}, set(), "")
    return ModelBaseline(
        model=_text(data["model"], "model"),
        device=_text(data["device"], "device"),
        configurations=_each(data["configurations"], "configurations", _configuration),
    )


def _configuration(data: object, where: str) -> Configuration:
    record = _object(data, where)
    _check_keys(record, {"cases", "workspaces"}, {"held"}, where)
    cases: dict[str, CaseBaseline] = _each(record["cases"], f"{where}.cases", _case)
    tables = _each(record["workspaces"], f"{where}.workspaces", _counts)
    for label, case in cases.items():
        if case.workspaces is not None and case.workspaces not in tables:
            raise _SchemaError(f"{where}.cases[{_short(label)}]: no workspaces called {_short(case.workspaces)}")
    held = _each(record.get("held", {}), f"{where}.held", lambda value, at: _each(value, at, _counts))
    for label, case in cases.items():
        for name in (case.original_held, case.optimized_held):
            if name is not None and name not in held:
                raise _SchemaError(f"{where}.cases[{_short(label)}]: no table of what is held called {_short(name)}")
    return Configuration(cases, tables, held)


def _counts(data: object, where: str) -> dict[str, int]:
    return _each(data, where, _count)


def _case(data: object, where: str) -> CaseBaseline:
    return CaseBaseline(**_fields(data, where, CaseBaseline))


def _measured(data: object, where: str) -> Measured:
    return Measured(**_fields(data, where, Measured))


def _fields(data: object, where: str, kind: type[CaseBaseline | Measured]) -> dict[str, Any]:
    """The arguments of a record, each read by the reader of its field."""
    record = _object(data, where)
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    if kind is CaseBaseline:
        needed.add("measured")
    _check_keys(record, needed, {field.name for field in fields(kind)}, where)
    return {name: _READERS.get(name, _count)(value, f"{where}.{name}") for name, value in record.items()}


def _each(data: object, where: str, read: Callable[[object, str], Any]) -> dict[str, Any]:
    return {key: read(value, f"{where}[{_short(key)}]") for key, value in _object(data, where).items()}


def _object(data: object, where: str) -> dict[str, object]:
    if not isinstance(data, dict):
        raise _SchemaError(f"{where}: expected an object, found {_short(data)}")
    return data


def _check_keys(record: Mapping[str, object], needed: set[str], allowed: set[str], where: str) -> None:
    prefix = f"{where}: " if where else ""
    missing = sorted(needed - set(record))
    if missing:
        raise _SchemaError(f"{prefix}{missing[0]!r} is missing")
    unknown = sorted(set(record) - needed - allowed)
    if unknown:
        raise _SchemaError(f"{prefix}unknown entry {_short(unknown[0])}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _SchemaError(f"{where}: expected text, found {_short(value)}")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _SchemaError(f"{where}: expected true or false, found {_short(value)}")
    return value


def _count(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise _SchemaError(f"{where}: expected a whole number from 0 to {LARGEST_COUNT}, found {_short(value)}")
    return value


def _ratio(value: object, where: str) -> float:
    if type(value) not in (int, float) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST_COUNT:
        raise _SchemaError(f"{where}: expected a positive number, found {_short(value)}")
    ratio = float(value)
    if not math.isfinite(ratio):
        raise _SchemaError(f"{where}: expected a finite number, found {_short(value)}")
    return ratio


_READERS: Mapping[str, Callable[[object, str], object]] = {
    "constants": _text,
    "feasible": _flag,
    "graph": _text,
    "latency_ratio": _ratio,
    "latency_ratio_low": _ratio,
    "latency_ratio_high": _ratio,
    "optimized_held": _text,
    "original_held": _text,
    "planner": _text,
    "step": _text,
    "workspaces": _text,
    "measured": lambda value, where: _each(value, where, _measured),
}


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):  # as a badly resolved merge leaves it: which of the two holds?
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {_short(key)} occurs twice")
            seen.add(key)
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
    """A value from a file for a message: hostile ones can be megabytes, or numbers too long to print."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_COUNT:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def file_name(name: str) -> str:
    """`name` as a file's name: bytes other than letters, digits, "_", "-" and "." become %XX, so no two names meet."""
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
