"""Operator profiles: measured costs in one sorted JSON file per device and torch, and interpolation between sizes.

    {
     "schema": 2,
     "device": {"device": "cpu", "instruction set": "AVX512", "threads": "2", "torch": "2.13.0+cpu"},
     "link": 0,
     "copy_ns": 0,
     "schemas": {
      "aten.mm.default": "aten::mm(Tensor self, Tensor mat2) -> Tensor"
     },
     "operators": {
      "aten.mm.default(float32[512,256]{256,1}, ...)": {"ns": 401000, "spread": 900, "workspace": 0, "samples": 31}
     }
    }

`ns` is the median of `samples` timings in nanoseconds, `spread` half of their interquartile range, `workspace` in
bytes, `link` the bandwidth between host and device in bytes per second, `copy_ns` the fixed time of a host copy (either
is 0 if not measured; `copy_ns` may be missing). `schemas` has the operators' schemas in the torch that ran them: an
operator with another schema in the installed torch is not used (`without_changed_operators`). Files are replaced
atomically, so that no reader meets half a file.
"""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from magis.atomic_files import put_in_place, read_regular
from magis.errors import UsageError
from magis.graph.nodes import Arg, Const, Op, Ref, Value
from magis.ops.operators import op_info

SCHEMA = 2
_MOST = 2**44
"""Upper bound of an operator's nanoseconds (five hours) or bytes (16 TiB): sums of thousands fit into int64."""
_LONGEST = 20_000
"""Most characters of a signature, a schema or a name."""
_TENSOR = re.compile(r"(\b[a-z]+\d+|\bbool)\[")


class ProfileError(UsageError):
    """A stored profile cannot be used: unreadable, corrupt, of a newer schema, or for another device."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Cost of one signature: median and spread in ns, workspace in bytes, number of timings."""

    ns: int
    spread: int
    workspace: int
    samples: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs by signature, the identity of their device, and the schemas of the operators."""

    device: Mapping[str, str]
    entries: Mapping[str, Entry] = field(default_factory=dict)
    schemas: Mapping[str, str] = field(default_factory=dict)
    """Schemas by operator name ("aten.mm.default")."""
    link: int = 0
    """Bytes per second between host and device, in the slower direction; 0: not measured."""
    copy_ns: int = 0
    """Fixed time of a host copy in ns; 0: not measured."""

    @property
    def dtypes(self) -> frozenset[str]:
        """Data types of the measured operators' input tensors."""
        return frozenset(found for key in self.entries for found in _TENSOR.findall(key))

    @property
    def digest(self) -> str:
        """Digest of everything that prices depend on, without device identity and number of timings."""
        copies = [self.link] if self.copy_ns == 0 else [self.link, self.copy_ns]  # older profiles keep their digest
        prices = [*copies, sorted((key, entry.ns, entry.workspace) for key, entry in self.entries.items())]
        return sha256(json.dumps(prices).encode()).hexdigest()[:12]


def target_of(key: str) -> str:
    """Return the operator name of a signature: "aten.mm.default"."""
    return key.partition("(")[0]


def without_changed_operators(
    profile: Profile, schema_of: Callable[[str], str | None]
) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile without operators whose schema is different here, and the sorted names of those operators.

    `schema_of` returns an operator's schema in the installed torch; None if there is no such operator.
    """
    changed = {target for target, text in profile.schemas.items() if schema_of(target) != text}
    kept = {key: entry for key, entry in profile.entries.items() if target_of(key) not in changed}
    schemas = {target: text for target, text in profile.schemas.items() if target not in changed}
    return replace(profile, entries=kept, schemas=schemas), tuple(sorted(changed))


def load(path: Path) -> Profile:
    """Read a profile. Raises ProfileError, in one line; the file is not changed."""
    try:
        text = read_regular(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ProfileError(f"cannot read the operator profile {path}: {reason}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"no JSON ({error})") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise _corrupt(path, "no schema number")
    if data["schema"] != SCHEMA:
        hint = "update pytest-magis" if data["schema"] > SCHEMA else "record it again with magis profile"
        raise ProfileError(
            f"the operator profile {path} has schema {data['schema']}, this version reads {SCHEMA}", hint=hint
        )
    device = _texts(path, data.get("device"), "no device identity")
    link = data.get("link", 0)
    if type(link) is not int or not 0 <= link < 2**62:
        raise _corrupt(path, "its link carries no number of bytes a second")
    copy_ns = data.get("copy_ns", 0)
    if type(copy_ns) is not int or not 0 <= copy_ns < _MOST:
        raise _corrupt(path, "its copies take no number of nanoseconds")
    entries = _entries(path, data.get("operators"))
    return Profile(device, entries, _texts(path, data.get("schemas"), "no schemas"), link, copy_ns)


def _corrupt(path: Path, reason: str) -> ProfileError:
    hint = "restore it from version control, or delete it and measure again"
    return ProfileError(f"the operator profile {path} is corrupt: {reason}", hint=hint)


def _texts(path: Path, data: Any, missing: str) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise _corrupt(path, missing)
    for text in (*data, *data.values()):
        _check_text(path, text)
    return dict(data)


def _check_text(path: Path, text: str) -> None:
    """Raise ProfileError for a text that is not printable, or too long."""
    if not 0 < len(text) <= _LONGEST or not text.isprintable():
        raise _corrupt(path, f"a text that cannot be shown: {text[:40]!a}")


def _entries(path: Path, data: Any) -> dict[str, Entry]:
    if not isinstance(data, dict):
        raise _corrupt(path, "no operators")
    found = {}
    for key, value in data.items():
        numbers = [value.get(name) if isinstance(value, dict) else None for name in Entry.__slots__]
        whole = [number for number in numbers if type(number) is int and 0 <= number < _MOST]
        _check_text(path, key)
        if len(whole) != len(numbers) or not whole[0]:
            raise _corrupt(path, f"the entry of {key!r} lacks ns (above 0), spread, workspace or samples")
        found[key] = Entry(*whole)
    return found


def merge(first: Profile, second: Profile) -> Profile:
    """Merge two profiles. For a signature in both, the entry with more samples is used; on a tie, the lower median.

    The result does not depend on the order of the two. Raises ProfileError if devices or operator schemas differ.
    """
    if dict(first.device) != dict(second.device):
        raise ProfileError(
            f"profiles of different devices: {_device_line(first.device)} and {_device_line(second.device)}",
            hint="keep one file per device",
        )
    for target in sorted(first.schemas.keys() & second.schemas.keys()):
        if first.schemas[target] != second.schemas[target]:
            raise ProfileError(f"profiles of different operators: {target} has two schemas", hint="record it again")
    entries = dict(first.entries)
    for key, entry in second.entries.items():
        entries[key] = min(
            entries.get(key, entry), entry, key=lambda known: (-known.samples, known.ns, known.spread, known.workspace)
        )
    copy_ns = min(filter(None, (first.copy_ns, second.copy_ns)), default=0)
    return Profile(first.device, entries, {**first.schemas, **second.schemas}, max(first.link, second.link), copy_ns)


def _device_line(device: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(device.items()))


def save(profile: Profile, path: Path) -> None:
    """Write a profile atomically, sorted, one operator per line. Raises ProfileError if the file cannot be written."""
    rows = {key: {name: getattr(entry, name) for name in Entry.__slots__} for key, entry in profile.entries.items()}
    parts = [f'"schema": {SCHEMA}', f'"device": {json.dumps(dict(profile.device), sort_keys=True)}']
    parts += [f'"link": {profile.link}', f'"copy_ns": {profile.copy_ns}']
    parts += [f'"schemas": {_lines(profile.schemas)}', f'"operators": {_lines(rows)}']
    text = "{\n " + ",\n ".join(parts) + "\n}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_in_place(path, text.encode())
    except OSError as error:
        raise ProfileError(f"cannot write the operator profile {path}: {error.strerror}") from None


def _lines(table: Mapping[str, Any]) -> str:
    """Return a table as JSON, sorted, one row per line."""
    rows: Iterator[str] = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(table.items()))
    body = ",\n".join(rows)
    return f"{{\n{body}\n }}" if body else "{}"


# Interpolation: the time of an operator that a profile lacks, from its measured kin.
#
# Kin are calls of one operator that differ in sizes alone: the same data types, orders of strides and literals that
# are not sizes. A roofline (`magis.cost.operator_latency`) gives the effect of sizes, the profile the ratio between
# this kernel and the roofline:
#
#     time = roofline * r        r: measured / roofline, interpolated linearly between the nearest kin
#
# Beyond the smallest and the largest kin r is constant, up to a factor REACH of the roofline; further out, and with
# fewer than LEAST kin, there is no prediction. The typical error is measured on the kin: each is predicted from the
# others (`error`, the median). Only sums, products and quotients, so that results are equal on every machine.

LEAST = 3
"""Fewest measured calls for an interpolation: each can be left out and predicted from two others."""
REACH = 4
"""Largest factor of the roofline by which a prediction may lie beyond the measured sizes."""
SMALL = 8
FARTHEST = 2.0
"""Relative error above which the measured calls do not predict each other."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Predicted nanoseconds, and their typical relative error."""

    ns: int
    error: float


@dataclass(frozen=True)
class Curve:
    """Measured calls that differ in sizes only: pairs of roofline and measured ns, by increasing roofline."""

    points: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, points: Sequence[tuple[int, int]]) -> Curve:
        """Build the curve; calls with equal roofline become one point, their median."""
        known: dict[int, list[int]] = {}
        for expected, seen in points:
            known.setdefault(max(1, expected), []).append(seen)
        return cls(tuple((expected, statistics.median_low(seen)) for expected, seen in sorted(known.items())))

    def at(self, expected: int) -> Answer | None:
        """Return the predicted time of a call with roofline `expected` (ns); None where no prediction is possible."""
        if len(self.points) < LEAST or self.error > FARTHEST:
            return None
        ends = self.points[0][0], self.points[-1][0]
        if expected * REACH < ends[0] or expected > ends[1] * REACH:
            return None
        return Answer(_interpolate(self.points, expected), self.error)

    @cached_property
    def error(self) -> float:
        """Median relative error when each measured call is predicted from the others."""
        missed = []
        for position, (expected, seen) in enumerate(self.points):
            others = self.points[:position] + self.points[position + 1 :]
            if others and seen:
                missed.append(abs(_interpolate(others, expected) - seen) / seen)
        return statistics.median(missed) if missed else FARTHEST


def _interpolate(points: Sequence[tuple[int, int]], expected: int) -> int:
    """Interpolate the ratio of time to roofline linearly between neighbours; beyond the ends it is constant."""
    right = bisect_left(points, (expected, 0))
    low = points[max(0, right - 1)]
    high = points[min(right, len(points) - 1)]
    ratio = Fraction(low[1], low[0])
    if high[0] > low[0]:
        ratio += (Fraction(high[1], high[0]) - ratio) * Fraction(expected - low[0], high[0] - low[0])
    return round(expected * ratio)


def kin_key(op: Op, values: Mapping[int, Value]) -> str:
    """Return a key that is equal for calls of one operator that differ in sizes only.

    Integers above SMALL count as sizes; smaller ones are dimensions, strides or paddings, which select another kernel,
    as does the kernel size of a convolution. Booleans, strings and dtypes are part of the key.
    """
    parts = [_arg_kind(arg, values) for arg in op.args]
    parts += [f"{name}={_arg_kind(arg, values)}" for name, arg in op.kwargs]
    at = {"conv": 1, "conv_backward": 2}.get(op_info(op.target).kind)
    weight = op.args[at] if at is not None and at < len(op.args) else None
    window = f" {values[weight.value].shape[2:]}" if isinstance(weight, Ref) else ""
    return f"{op.target}({', '.join(parts)}){window}"


def _arg_kind(arg: Arg, values: Mapping[int, Value]) -> str:
    match arg:
        case Ref(number):
            # dtype and dimension order, slowest first: size-1 dimensions in front, expanded ones marked
            value = values[number]
            sizes = list(zip(value.shape, value.stride, strict=True))
            order = sorted(range(len(sizes)), key=lambda at: (sizes[at][0] > 1, -sizes[at][1], at))
            marks = [f"{at}x" if sizes[at][0] > 1 and sizes[at][1] == 0 else str(at) for at in order]
            fastest = min((stride for size, stride in sizes if size > 1 and stride), default=1)
            return f"{value.dtype}[{' '.join(marks)}{'' if fastest == 1 else ' apart'}]"
        case bool() | str() | None:
            return repr(arg)
        case int():
            return repr(arg) if abs(arg) <= SMALL else "#"
        case float():
            return "#"
        case tuple():
            return f"[{', '.join(_arg_kind(item, values) for item in arg)}]"
        case Const(kind, name):
            return f"{kind}:{name}" if kind == "dtype" else kind
        case _:
            return "$"
