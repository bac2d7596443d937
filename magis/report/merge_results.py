"""Several results.csv as one: the shares of a run that several machines made. Texts of fields stay as they are."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from magis.errors import UsageError

CASE = ("name", "strategy", "device", "preset", "dtype", "memory limit ratio", "latency limit ratio")
"""The columns that tell cases apart."""
RED = ("FAIL", "ERROR")
"""What the verdict of a red case begins with."""
GREEN = ("pass", "accepted", "new", "not gated", "infeasible, proven", "no plan found")
"""And that of a green one: anything else is no verdict that a gate may pass."""
NEEDED = (*CASE, "verdict")
SEARCH = "search"
"""Tells cases apart, too; files of earlier versions lack it: their plans are all of one search."""
OURS = "magis"
HINT = "give files that the plugin has written (--magis-csv)"


@dataclass(frozen=True)
class Merged:
    """The rows of all files, in their order, each case once."""

    columns: tuple[str, ...]
    """Of all files: those of the first one, then those that it lacks."""
    rows: tuple[Mapping[str, str], ...]

    @property
    def red(self) -> tuple[Mapping[str, str], ...]:
        """Rows of cases that failed."""
        return tuple(row for row in self.rows if row["verdict"].startswith(RED))

    def text(self) -> str:
        """As results.csv; fields of columns that a row's file had not are empty."""
        stream = io.StringIO()
        writer = csv.DictWriter(stream, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return stream.getvalue()


def merge_results(paths: Sequence[Path]) -> Merged:
    """The results of the files as one. A case may be in several of them if its rows are equal.

    Raises UsageError for what is no results file, and for a case with two different rows.
    """
    columns: dict[str, None] = {}
    found: dict[tuple[str, ...], tuple[dict[str, str], Path]] = {}
    for path in paths:
        header, rows = _read(path)
        columns |= dict.fromkeys(header)
        for row in rows:
            if not row["verdict"].startswith((*RED, *GREEN)):
                raise UsageError(f"{path}: the case {case_name(row)} has no verdict but {row['verdict']!r}", hint=HINT)
            key = (*(row[column] for column in CASE), row.get(SEARCH) or OURS)
            known, first = found.setdefault(key, (row, path))
            if _filled(known) != _filled(row):
                where = f"{first} and {path}" if first != path else f"{path} twice"
                raise UsageError(
                    f"the case {case_name(row)} is in {where}, with different figures",
                    hint="leave one of them out, or run its share anew",
                )
    return Merged(tuple(columns), tuple(row for row, _ in found.values()))


def case_name(row: Mapping[str, str]) -> str:
    """A row's case for a reader: "bert[magis mem 0.6]"."""
    limits = (("mem", row["memory limit ratio"]), ("lat", row["latency limit ratio"]))
    by = [search] if (search := row.get(SEARCH, OURS)) not in ("", OURS) else []
    return f"{row['name']}[{' '.join((row['strategy'], *by, *(f'{kind} {ratio}' for kind, ratio in limits if ratio)))}]"


def _filled(row: Mapping[str, str]) -> dict[str, str]:
    return {SEARCH: OURS} | {column: text for column, text in row.items() if text}


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows of a results file."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            lines = list(csv.reader(stream, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no csv in UTF-8 ({error})"
        raise UsageError(f"cannot read the results {path}: {reason}", hint=HINT) from None
    header = lines[0] if lines else []
    missing = [column for column in NEEDED if column not in header]
    if missing or len(set(header)) != len(header):
        why = f"its first line has no column {missing[0]!r}" if missing else "its first line has a column twice"
        raise UsageError(f"{path} is no results file: {why}", hint=HINT)
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(header):
            raise UsageError(f"{path}: row {number} has {len(line)} fields, the header {len(header)}", hint=HINT)
    return header, [dict(zip(header, line, strict=True)) for line in lines[1:]]
