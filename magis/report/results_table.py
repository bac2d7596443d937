"""results.csv with one row per case, and merging of several such files.

The first 17 columns are those of the seed, with the seed's names, order and meaning: "memory" is peak bytes / item size
of the dtype (of the weights' for tf32 and under autocast: 4), an exact float, "latency" is milliseconds. Further
columns name their unit, and every ratio is optimized / original (opt/ori). A file has the most useful columns
(`SHORT_COLUMNS`), or all of them (`--magis-csv-full`).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from magis.atomic_files import check_readable, write_text_atomically
from magis.dtypes import tensor_type
from magis.errors import UsageError
from magis.printable import printable
from magis.results import CaseResult, RankMemory, StepFigures
from magis.units import in_one_word

if TYPE_CHECKING:
    import pandas as pd

Cell: TypeAlias = "str | int | float | bool | None"
"""A cell of a row; None is an empty field."""

Column = Callable[[CaseResult], Cell]

_SEED_CELLS: Mapping[str, Column] = {
    "name": lambda r: r.case.model,
    "device memory limit": lambda r: _in_items(r, r.device_memory_bytes),
    "latency limit": lambda r: r.latency_limit_ms,
    "memory limit": lambda r: _in_items(r, r.memory_limit_bytes),
    "latency limit ratio": lambda r: r.case.latency_ratio,
    "memory limit ratio": lambda r: r.case.memory_ratio,
    "weight memory": lambda r: _in_items(r, r.weight_bytes),
    "opt-is-prof-result": lambda r: r.optimized.is_measured,
    "opt-latency": lambda r: _latency(r.optimized),
    "opt-memory": lambda r: _in_items(r, r.memory.peak_bytes),
    "opt-simul-latency": lambda r: r.optimized.simulated_ms,
    "opt-simul-memory": lambda r: _in_items(r, r.optimized.simulated.peak_bytes),
    "ori-is-prof-result": lambda r: r.original.is_measured,
    "ori-latency": lambda r: _latency(r.original),
    "ori-memory": lambda r: _in_items(r, r.original_memory.peak_bytes),
    "ori-simul-latency": lambda r: r.original.simulated_ms,
    "ori-simul-memory": lambda r: _in_items(r, r.original.simulated.peak_bytes),
}

_OWN_CELLS: Mapping[str, Column] = {
    "device": lambda r: r.case.device,
    "preset": lambda r: r.case.preset,
    "dtype": lambda r: r.dtype,
    "strategy": lambda r: r.case.strategy,
    "search": lambda r: r.case.search,
    "ranks": lambda r: r.case.ranks,
    "figures": lambda r: "predicted" if r.is_predicted else "measured",
    "samples per second": lambda r: r.samples_per_s,
    "samples per second spread": lambda r: r.samples_per_s_spread,
    "memory ratio reached (opt/ori)": lambda r: _ratio(
        r.optimized.needed_bytes(r.case.memory_limit_of), r.original.needed_bytes(r.case.memory_limit_of)
    ),
    "latency ratio reached (opt/ori)": lambda r: r.ratio.ratio if r.ratio else _latency_ratio(r.optimized, r.original),
    "latency ratio low (opt/ori)": lambda r: r.ratio.low if r.ratio else None,
    "latency ratio high (opt/ori)": lambda r: r.ratio.high if r.ratio else None,
    "latency ratio bound (opt/ori)": lambda r: r.latency_ratio_bound,
    "worst latency ratio (opt/ori)": lambda r: r.search.worst_latency_ratio,
    "timed pairs": lambda r: r.ratio.pairs if r.ratio else None,
    "opt peak bytes": lambda r: r.memory.peak_bytes,
    "ori peak bytes": lambda r: r.original_memory.peak_bytes,
    "opt tensor bytes": lambda r: r.memory.tensor_bytes,
    "ori tensor bytes": lambda r: r.original_memory.tensor_bytes,
    "opt workspace bytes": lambda r: r.memory.workspace_bytes,
    "ori workspace bytes": lambda r: r.original_memory.workspace_bytes,
    "opt reserved bytes (predicted)": lambda r: r.optimized.reserved_bytes,
    "ori reserved bytes (predicted)": lambda r: r.original.reserved_bytes,
    "opt reserved bytes (measured)": lambda r: r.optimized.measured_reserved_bytes,
    "ori reserved bytes (measured)": lambda r: r.original.measured_reserved_bytes,
    "memory limit of": lambda r: r.case.memory_limit_of if r.case.limits_memory else None,
    "memory limit bytes": lambda r: r.memory_limit_bytes,
    "lower bound bytes": lambda r: r.lower_bound_bytes,
    "persistent bytes": lambda r: r.persistent_bytes,
    "opt memory error bytes (simulated - measured)": lambda r: _error_bytes(r.optimized),
    "opt memory error % (of measured)": lambda r: _error_percent(r.optimized),
    "ori memory error bytes (simulated - measured)": lambda r: _error_bytes(r.original),
    "ori memory error % (of measured)": lambda r: _error_percent(r.original),
    "opt latency error % (of measured)": lambda r: _latency_error_percent(r.optimized),
    "ori latency error % (of measured)": lambda r: _latency_error_percent(r.original),
    "opt latency spread ms": lambda r: r.optimized.spread_ms,
    "ori latency spread ms": lambda r: r.original.spread_ms,
    "search seconds": lambda r: r.search.seconds,
    "states evaluated": lambda r: r.search.states,
    "stopped by seconds": lambda r: r.search.stopped_by_seconds,
    "feasible": lambda r: r.search.feasible,
    "recomputed operators": lambda r: r.search.recomputed_ops,
    "swapped bytes": lambda r: r.search.swapped_bytes,
    "fission": lambda r: r.search.fission or (f"none: {r.search.unsplit}" if r.search.unsplit else ""),
    "measured latency share": lambda r: r.provenance.measured,
    "interpolated latency share": lambda r: r.provenance.interpolated,
    "estimated latency share": lambda r: r.provenance.estimated,
    "interpolation off by % (typical)": lambda r: 100 * r.provenance.error if r.provenance.interpolated else None,
    "priced by": lambda r: r.provenance.source,
    "peak bytes of each rank": lambda r: _format_rank_peaks(r.ranks),
    "predicted peak of the worst rank by terms": lambda r: _format_terms(r.ranks),
    "numbers": lambda r: r.numbers,
    "conformance": lambda r: r.conformance,
    "verdict": lambda _: "",
    "note": lambda r: r.note,
    "graph digest": lambda r: r.graph_digest,
    "torch version": lambda r: r.identity.get("torch", ""),
    "device identity": lambda r: ", ".join(f"{key}={value}" for key, value in sorted(r.identity.items())),
}

SEED_COLUMNS, OWN_COLUMNS = tuple(_SEED_CELLS), tuple(_OWN_CELLS)
COLUMNS = SEED_COLUMNS + OWN_COLUMNS
SHORT_COLUMNS = (
    *SEED_COLUMNS, "device", "preset", "dtype", "strategy", "search", "ranks", "memory limit of",
    "latency ratio reached (opt/ori)", "opt peak bytes", "ori peak bytes",
    "verdict", "note",
)  # fmt: skip
"""Default columns of a file, which include those that identify a case."""


def row_from_result(result: CaseResult, *, verdict: str = "", note: str | None = None) -> dict[str, Cell]:
    """Return the row of one case, in the order of COLUMNS. `note` replaces the result's own note."""
    row = {column: cell(result) for table in (_SEED_CELLS, _OWN_CELLS) for column, cell in table.items()}
    return row | {"verdict": verdict, "note": result.note if note is None else note}


def write_csv(path: Path, rows: Sequence[Mapping[str, Cell]], *, full: bool = False) -> None:
    """Replace `path` atomically by a header and `rows`, with the short columns, or all if `full`.

    Unknown columns come last. Raises UsageError for a path that cannot be written; the old file is then unchanged.
    """
    further = dict.fromkeys(column for row in rows for column in row if column not in COLUMNS)
    columns = (*(COLUMNS if full else SHORT_COLUMNS), *further)
    write_text_atomically(path, _to_csv(rows, columns, header=True))


_TEXTS = frozenset(
    {"name", "device", "preset", "dtype", "strategy", "search", "figures", "fission", "priced by", "numbers", "verdict"}
    | {"peak bytes of each rank", "predicted peak of the worst rank by terms", "conformance", "note", "graph digest"}
    | {"torch version", "device identity", "memory limit of"}
)
_FLAGS = frozenset({"opt-is-prof-result", "ori-is-prof-result", "stopped by seconds", "feasible"})
_COUNTS = frozenset({"ranks", "timed pairs", "states evaluated", "recomputed operators"})


def append_rows(stream: IO[str], rows: Sequence[Mapping[str, Cell]]) -> None:
    """Append `rows` to an open text file (`open("results.csv", "a")`), preceded by a header if the file is empty.

    An existing header is kept: values go to columns of the same name, other values are dropped, other columns stay
    empty. Raises UsageError if the first line is no header of results.
    """
    try:
        empty = stream.tell() == 0
    except (OSError, io.UnsupportedOperation):
        empty = True  # a pipe, which is new
    if empty:
        stream.write(_to_csv(rows, SHORT_COLUMNS, header=True))
    else:
        columns, ends_with_newline = _existing_header(stream)
        stream.write(("" if ends_with_newline else "\n") + _to_csv(rows, columns, header=False))
    stream.flush()


def read_results(paths: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """Read one or several results files as a DataFrame: one row per case, with typed columns.

    Bytes and counts are Int64, flags boolean, texts string, all else Float64; an empty field is a missing value.
    Columns of plugins have inferred types. With several files, the first column "run" is the file's path.
    `frame.attrs["units"]` maps columns of ours to units: "bytes", "ms", "s", "elements" (bytes / item size of the
    dtype), "opt/ori", "%".

    Raises UsageError, which names the file, for anything but results files.
    """
    import pandas as pd

    if isinstance(paths, (str, Path)):
        frame = _read_frame(Path(paths))
    else:
        named = {str(path): _read_frame(Path(path)) for path in paths}
        if not named:
            raise UsageError("no file of results was given")
        frame = pd.concat(named, names=["run"]).reset_index("run").reset_index(drop=True)
    frame.attrs["units"] = {column: unit for column in frame.columns if (unit := _unit(column))}
    return frame


def _read_frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    types = {column: _column_type(column) for column in COLUMNS}
    try:
        check_readable(path)
        frame = pd.read_csv(
            path,
            compression=None,  # never inferred from the file's name
            dtype=types,
            dtype_backend="numpy_nullable",
            keep_default_na=False,
            na_values=[""],
            encoding="utf-8",
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot read the results {path}: {reason}", hint=HINT) from error
    _check_header(frame.columns, path)
    return frame


def _column_type(column: str) -> str:
    if column in _TEXTS:
        return "string"
    if column in _FLAGS:
        return "boolean"
    return "Int64" if column in _COUNTS or _unit(column) == "bytes" else "Float64"


def _unit(column: str) -> str:
    """Return the unit of a column; "" without one."""
    if column in _TEXTS | _FLAGS:
        return ""
    if column in SEED_COLUMNS:
        return "opt/ori" if "ratio" in column else "ms" if "latency" in column else "elements"
    words = column.partition("(")[0].split()
    found = {"%": "%", "bytes": "bytes", "ms": "ms", "seconds": "s", "ratio": "opt/ori"}
    return next((unit for word, unit in found.items() if word in words), "")


def _format_rank_peaks(ranks: Sequence[RankMemory]) -> str:
    peaks = ((rank.rank, rank.measured or rank.predicted) for rank in ranks)
    return "; ".join(f"{rank}: {memory.peak_bytes if memory else ''}" for rank, memory in peaks)


def _format_terms(ranks: Sequence[RankMemory]) -> str:
    """Return the terms of the highest predicted peak of all ranks: "parameters 4096 + gradients 4096"."""
    known = [rank for rank in ranks if rank.predicted is not None and rank.terms]
    if not known:
        return ""
    worst = max(known, key=lambda rank: rank.predicted.peak_bytes if rank.predicted else 0)
    return " + ".join(f"{term.name} {term.nbytes}" for term in worst.terms)


def _in_items(result: CaseResult, nbytes: int | None) -> float | None:
    """Return bytes / item size of the result's dtype."""
    from magis.graph import ITEM_SIZE

    size = ITEM_SIZE.get(tensor_type(result.dtype))
    if size is None:
        raise UsageError(f"results.csv: unknown data type {result.dtype!r} of {result.case.model}")
    return None if nbytes is None else nbytes / size


def _error_bytes(step: StepFigures) -> int | None:
    """Return simulated - measured peak bytes; None if the step did not run."""
    return step.simulated.peak_bytes - step.measured.peak_bytes if step.measured else None


def _error_percent(step: StepFigures) -> float | None:
    share = _ratio(_error_bytes(step), step.measured.peak_bytes if step.measured else None)
    return None if share is None else 100 * share


def _latency_error_percent(step: StepFigures) -> float | None:
    share = _ratio(step.simulated_ms, step.measured_ms)
    return None if share is None else 100 * (share - 1)


def _latency(step: StepFigures) -> float | None:
    """Return a step's milliseconds: measured if it ran (None if untimed), else simulated."""
    return step.measured_ms if step.is_measured else step.simulated_ms


def _latency_ratio(optimized: StepFigures, original: StepFigures) -> float | None:
    """Return optimized / original latency, both simulated if only one step ran."""
    if optimized.is_measured != original.is_measured:
        return _ratio(optimized.simulated_ms, original.simulated_ms)
    return _ratio(_latency(optimized), _latency(original))


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def _to_csv(rows: Iterable[Mapping[str, Cell]], columns: Sequence[str], *, header: bool) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows([columns] if header else ())
    for row in rows:
        cells = [row.get(column) for column in columns]
        cells = [None if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells]
        writer.writerow([printable(cell, "csv") if isinstance(cell, str) else cell for cell in cells])
    return stream.getvalue()


def _existing_header(stream: IO[str]) -> tuple[list[str], bool]:
    """Return the columns of the stream's file (SHORT_COLUMNS without one), and True if its last line is complete."""
    name = getattr(stream, "name", None)
    if not isinstance(name, str) or not Path(name).is_file():
        return list(SHORT_COLUMNS), True
    stream.flush()
    with Path(name).open("rb") as existing:
        first = existing.readline().decode("utf-8", errors="replace")
        existing.seek(-1, io.SEEK_END)
        ends_with_newline = existing.read(1) == b"\n"
    columns = next(csv.reader([first]), [])
    _check_header(columns, name)
    return columns, ends_with_newline


def _check_header(columns: Iterable[str], name: str | Path) -> None:
    if not {"name", "opt-memory", "ori-memory"} <= set(columns):
        raise UsageError(f"{name} has no header of results in its first line", hint="use an empty or another file")


# Merging of files, the shards of a run on several machines. Fields stay texts, so that numbers do not change.

CASE = ("name", "strategy", "device", "preset", "dtype", "memory limit ratio", "latency limit ratio")
"""Columns that identify a case."""
RED = ("FAIL", "ERROR")
"""Prefixes of the verdicts of red cases."""
GREEN = ("pass", "accepted", "new", "not gated", "infeasible, proven", "no plan found")
"""Prefixes of the verdicts of green cases; a gate must not pass any other verdict."""
NEEDED = (*CASE, "verdict")
SEARCH, OURS = "search", "magis"
LATER = {SEARCH: OURS, "memory limit of": "peak", "ranks": "1"}
"""Further columns that identify a case -> value for files of earlier versions, which lack the column."""
HINT = "give files that the plugin has written (--magis-csv)"


@dataclass(frozen=True)
class Merged:
    """The merged rows of all files, in order, each case once."""

    columns: tuple[str, ...]
    """Columns of all files: those of the first file, then further ones."""
    rows: tuple[Mapping[str, str], ...]

    @property
    def red(self) -> tuple[Mapping[str, str], ...]:
        """Return the rows of red cases."""
        return tuple(row for row in self.rows if row["verdict"].startswith(RED))

    def text(self) -> str:
        """Return the rows as the text of results.csv; columns that a row lacks are empty."""
        return _to_csv(self.rows, self.columns, header=True)


def merge_results(paths: Sequence[Path]) -> Merged:
    """Merge results files. Equal rows count once. Raises UsageError for other files, and for two rows of a case that
    differ in a column of both files."""
    columns: dict[str, None] = {}
    found: dict[tuple[str, ...], tuple[dict[str, str], Path]] = {}
    for path in paths:
        header, rows = _read_texts(path)
        columns |= dict.fromkeys(header)
        for row in rows:
            if not row["verdict"].startswith((*RED, *GREEN)):
                raise UsageError(f"{path}: the case {case_name(row)} has no verdict but {row['verdict']!r}", hint=HINT)
            limit = row["memory limit ratio"] or row.get("memory limit", "")
            later = (row.get(column) or usual for column, usual in LATER.items())
            key = (limit, *(row[column] for column in CASE), *later)
            known, first = found.get(key, (row, path))
            if any(known[column] != row[column] for column in (known.keys() & row.keys()) - LATER.keys()):
                where = f"{first} and {path}" if first != path else f"{path} twice"
                raise UsageError(
                    f"the case {case_name(row)} is in {where}, with different figures",
                    hint="leave one of them out, or run its share anew",
                )
            found[key] = row | known, first  # of a short and a full file, all columns
    return Merged(tuple(columns), tuple(row for row, _ in found.values()))


def case_name(row: Mapping[str, str]) -> str:
    """Return the readable name of a row's case: "bert[magis mem 0.6]", "net[magis mem 6KiB]", "bert[ddp-x4]"."""
    of = row.get("memory limit of", "").replace("peak", "") or "mem"
    memory = row["memory limit ratio"] or (_limit_in_bytes(row) if row.get("memory limit of") else "")
    limits = ((of, memory), ("lat", row["latency limit ratio"]))
    by = [search] if (search := row.get(SEARCH, OURS)) not in ("", OURS) else []
    strategy = row["strategy"] + (f"-x{ranks}" if (ranks := row.get("ranks", "")) not in ("", "1") else "")
    return f"{row['name']}[{' '.join((strategy, *by, *(f'{kind} {limit}' for kind, limit in limits if limit)))}]"


def _limit_in_bytes(row: Mapping[str, str]) -> str:
    """Return a row's memory limit in one word ("6KiB"), or "in bytes" if it has none that can be read."""
    from magis.graph import ITEM_SIZE

    try:
        nbytes = row.get("memory limit bytes") or float(row["memory limit"]) * ITEM_SIZE[tensor_type(row["dtype"])]
        return in_one_word(int(nbytes))
    except (KeyError, ValueError, OverflowError):
        return "in bytes"


def _read_texts(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return header and rows of a results file. Raises UsageError for other files."""
    try:
        check_readable(path)
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
