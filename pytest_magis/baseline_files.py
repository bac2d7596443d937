"""Baseline files: `<directory>/<device>/<model>.json`, with sorted keys and one value per line for readable diffs.

A file with anything outside the schema raises a BaselineError of one line, and stays unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from magis.errors import BaselineError, UsageError
from magis.plain_records import from_plain, read_json, short, to_plain
from magis.report import read_regular, write_text_atomically
from pytest_magis.baselines import ModelBaseline

SCHEMA = 1
LARGEST_FILE = 16 * 1024 * 1024
LONGEST_NAME = 150

_ADVICE = "restore the file from version control, or delete it and create it anew with --magis-update=new"


def baseline_path(directory: Path, device: str, model: str) -> Path:
    """Return the baseline file of a model on a device; unique for each name, and always inside the directory."""
    return directory / file_name(device.replace(":", "-")) / f"{file_name(model)}.json"


def read_baseline(path: Path, model: str, device: str) -> ModelBaseline | None:
    """Read a baseline file; None if it does not exist. Raises BaselineError if it is invalid or of another model."""
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
        found = f"{short(baseline.model)} on {short(baseline.device)}"
        _refuse(path, f"it is of {found}, not of {model!r} on {device!r}")
    return baseline


def write_baseline(path: Path, baseline: ModelBaseline) -> None:
    """Replace a baseline file atomically, and make its directory. Raises UsageError if it cannot be written."""
    _make_folder(path.parent)
    write_text_atomically(path, render(baseline))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder of baselines while this process reads, changes and writes a file in it.

    The lock is on the folder itself, so no lock file is left behind; on a file system without locks there is no lock.
    Raises BaselineError if the folder cannot be made.
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
    """Serialize a baseline to JSON text, the inverse of `parse`."""
    data = _without_none(to_plain(baseline))
    for configuration in data["configurations"].values():
        if not configuration["held"]:
            del configuration["held"]
    return json.dumps({"schema": SCHEMA, **data}, indent=2, sort_keys=True, allow_nan=False) + "\n"


def parse(text: str, path: Path) -> ModelBaseline:
    """Parse the JSON text of a baseline; error messages name `path`. Raises BaselineError for invalid text."""
    try:
        record = read_json(text)
        schema = record.pop("schema", None) if isinstance(record, dict) else 1
        if type(schema) is not int or schema < 1:
            _refuse(path, f"schema: expected {SCHEMA}, found {short(schema)}")
        if schema > SCHEMA:
            newer = f"made by a newer version of pytest-magis (schema {short(schema)}, this version reads {SCHEMA})"
            _refuse(path, newer, hint="upgrade pytest-magis")
        baseline = from_plain(ModelBaseline, record, "", counts=True)
    except BaselineError:
        raise
    except UsageError as error:
        raise BaselineError(f"baseline {path}: {error}", hint=_ADVICE) from error
    for name, configuration in baseline.configurations.items():
        for label, case in configuration.cases.items():
            where = f"configurations[{short(name)}].cases[{short(label)}]"
            if case.workspaces is not None and case.workspaces not in configuration.workspaces:
                _refuse(path, f"{where}: no workspaces called {short(case.workspaces)}")
            for held in (case.original_held, case.optimized_held):
                if held is not None and held not in configuration.held:
                    _refuse(path, f"{where}: no table of what is held called {short(held)}")
    return baseline


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if value is not None
    }


def _refuse(path: Path, why: str, hint: str = _ADVICE) -> NoReturn:
    raise BaselineError(f"baseline {path}: {why}", hint=hint)


def file_name(name: str) -> str:
    """Escape a name for use as a file name: every byte except letters, digits, "_", "-" and "." becomes %XX."""
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
