"""Profile store: measured costs of operators, one readable, sorted JSON file per device and torch version.

    {
     "schema": 1,
     "device": {"device": "cpu", "instruction set": "AVX512", "threads": "2", "torch": "2.13.0+cpu"},
     "operators": {
      "aten.mm.default(float32[512,256]{256,1}, ...)": {"ns": 401000, "workspace": 0, "samples": 31}
     }
    }

`ns` is the median of `samples` timings in nanoseconds, `workspace` the scratch in bytes. Files are replaced
as a whole (a temporary file beside them, then `os.replace`), so that a reader or an interruption never meets
half a file.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magis.errors import UsageError

__all__ = ["SCHEMA", "Entry", "Profile", "ProfileError", "load", "merge", "profile_path", "save"]

SCHEMA = 1


class ProfileError(UsageError):
    """A stored profile cannot be used: unreadable, corrupt, of a newer schema, or of another device."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Cost of one signature: median nanoseconds, workspace bytes, and how many timings the median is of."""

    ns: int
    workspace: int
    samples: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs by signature, and the identity of the device that they hold for."""

    device: Mapping[str, str]
    entries: Mapping[str, Entry] = field(default_factory=dict)


def profile_path(directory: Path, device: Mapping[str, str]) -> Path:
    """Where the profile of a device identity belongs: its values make the file's name."""
    name = "-".join(device[key] for key in sorted(device, key=lambda key: (key != "device", key)))
    return directory / (re.sub(r"[^A-Za-z0-9.+]+", "-", name).strip("-") + ".json")


def load(path: Path) -> Profile:
    """Read a profile. Raises ProfileError, in one line; the file stays as it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ProfileError(f"cannot read the operator profile {path}: {reason}") from None
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _corrupt(path, f"no JSON ({error})") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise _corrupt(path, "no schema number")
    if data["schema"] > SCHEMA:
        raise ProfileError(
            f"the operator profile {path} has schema {data['schema']}, this version reads up to {SCHEMA}",
            hint="update pytest-magis",
        )
    return Profile(_device(path, data.get("device")), _entries(path, data.get("operators")))


def _corrupt(path: Path, reason: str) -> ProfileError:
    hint = "restore it from version control, or delete it and measure again"
    return ProfileError(f"the operator profile {path} is corrupt: {reason}", hint=hint)


def _device(path: Path, data: Any) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise _corrupt(path, "no device identity")
    return dict(data)


def _entries(path: Path, data: Any) -> dict[str, Entry]:
    if not isinstance(data, dict):
        raise _corrupt(path, "no operators")
    found = {}
    for key, value in data.items():
        numbers = [value.get(name) if isinstance(value, dict) else None for name in Entry.__slots__]
        whole = [number for number in numbers if isinstance(number, int) and number >= 0]
        if len(whole) != len(numbers):
            raise _corrupt(path, f"the entry of {key!r} lacks ns, workspace or samples")
        found[key] = Entry(*whole)
    return found


def merge(first: Profile, second: Profile) -> Profile:
    """Both profiles' entries. Where both know a signature, the median of more samples wins, then the lower
    one.

    The order of the two does not matter. Raises ProfileError when they are of different devices.
    """
    if dict(first.device) != dict(second.device):
        raise ProfileError(
            f"profiles of different devices: {_line(first.device)} and {_line(second.device)}",
            hint="keep one file per device",
        )
    entries = dict(first.entries)
    for key, entry in second.entries.items():
        entries[key] = min(
            entries.get(key, entry), entry, key=lambda known: (-known.samples, known.ns, known.workspace)
        )
    return Profile(first.device, entries)


def _line(device: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(device.items()))


def save(profile: Profile, path: Path) -> None:
    """Write a profile, sorted, one operator a line, in one step. Raises ProfileError when it cannot be written."""
    rows = ",\n".join(
        f"  {json.dumps(key)}: " + json.dumps({"ns": entry.ns, "workspace": entry.workspace, "samples": entry.samples})
        for key, entry in sorted(profile.entries.items())
    )
    device = json.dumps(dict(profile.device), sort_keys=True)
    body = f"{{\n{rows}\n }}" if rows else "{}"
    text = f'{{\n "schema": {SCHEMA},\n "device": {device},\n "operators": {body}\n}}\n'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    except OSError as error:
        raise ProfileError(f"cannot write the operator profile {path}: {error.strerror}") from None


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes it private, which a committed file is not
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
