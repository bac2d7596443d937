"""results.csv: the seed's columns, ours, and how files grow."""

from __future__ import annotations

import csv
import gzip
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from magis.errors import UsageError
from magis.report import COLUMNS, OWN_COLUMNS, SEED_COLUMNS, append_rows, read_results, row_from_result, write_csv
from magis.report.results_table import SHORT_COLUMNS, merge_results
from magis.results import Memory, RankMemory, StepFigures, Term

SEED = (
    "name, device memory limit, latency limit, memory limit, latency limit ratio, memory limit ratio, weight memory, "
    "opt-is-prof-result, opt-latency, opt-memory, opt-simul-latency, opt-simul-memory, ori-is-prof-result, "
    "ori-latency, ori-memory, ori-simul-latency, ori-simul-memory"
)


def test_the_first_columns_are_the_seeds():
    assert ", ".join(SEED_COLUMNS) == SEED
    assert COLUMNS[:17] == SEED_COLUMNS
    assert len(set(COLUMNS)) == len(COLUMNS) == 17 + len(OWN_COLUMNS)


def test_a_measured_row(measured):
    row = row_from_result(measured, verdict="pass")
    assert tuple(row) == COLUMNS
    assert [row[column] for column in SEED_COLUMNS] == [
        "bert", 2**33 / 2, None, 4200.0, None, 0.8, 500.5,
        True, 10.5, 4000.0, 8.4, 3975.0,
        True, 10.0, 5250.5, 8.0, 5250.5,
    ]  # fmt: skip
    own = {column: row[column] for column in OWN_COLUMNS}
    assert own == {
        "device": "cpu",
        "preset": "small",
        "dtype": "bfloat16",
        "strategy": "magis",
        "search": "magis",
        "ranks": 1,
        "figures": "measured",
        "conformance": "not checked",
        "samples per second": None,
        "samples per second spread": None,
        "memory ratio reached (opt/ori)": 8000 / 10501,
        "latency ratio reached (opt/ori)": 1.04,
        "latency ratio low (opt/ori)": 1.03,
        "latency ratio high (opt/ori)": 1.06,
        "latency ratio bound (opt/ori)": None,
        "worst latency ratio (opt/ori)": 1.05,
        "timed pairs": 15,
        "opt peak bytes": 8000,
        "ori peak bytes": 10501,
        "opt tensor bytes": 7000,
        "ori tensor bytes": 10000,
        "opt workspace bytes": 1000,
        "ori workspace bytes": 501,
        "opt reserved bytes (predicted)": None,
        "ori reserved bytes (predicted)": None,
        "opt reserved bytes (measured)": None,
        "ori reserved bytes (measured)": None,
        "memory limit of": "peak",
        "memory limit bytes": 8400,
        "lower bound bytes": 4000,
        "persistent bytes": 3000,
        "opt memory error bytes (simulated - measured)": -50,
        "opt memory error % (of measured)": -0.625,
        "ori memory error bytes (simulated - measured)": 0,
        "ori memory error % (of measured)": 0.0,
        "opt latency error % (of measured)": pytest.approx(-20),
        "ori latency error % (of measured)": pytest.approx(-20),
        "opt latency spread ms": 0.5,
        "ori latency spread ms": 0.25,
        "search seconds": 1.5,
        "states evaluated": 321,
        "stopped by seconds": False,
        "feasible": True,
        "recomputed operators": 12,
        "swapped bytes": 0,
        "fission": "from layers.1 to the loss and back in 4 parts",
        "measured latency share": 0.5,
        "interpolated latency share": 0.25,
        "estimated latency share": 0.25,
        "interpolation off by % (typical)": 12.5,
        "priced by": "h200.json (NVIDIA H200, torch 2.11.0)",
        "peak bytes of each rank": "",
        "predicted peak of the worst rank by terms": "",
        "numbers": "bit-identical",
        "verdict": "pass",
        "note": "a note",
        "graph digest": "abc",
        "torch version": "2.13.0",
        "device identity": "instruction set=avx2, torch=2.13.0",
    }


def test_the_file_keeps_every_digit(tmp_path, measured, simulated):
    path = tmp_path / "results.csv"
    write_csv(path, [row_from_result(measured), row_from_result(simulated)], full=True)
    with path.open(newline="") as stream:
        first, second = csv.DictReader(stream)
    assert float(first["ori-memory"]) == 5250.5
    assert first["memory limit bytes"] == "8400"  # whole, although the next row has none
    assert second["memory limit bytes"] == ""
    assert (second["ori peak bytes"], second["opt-is-prof-result"]) == (str(2**60 + 8), "False")
    assert float(first["memory ratio reached (opt/ori)"]) == 8000 / 10501


def test_files_are_read_back_with_types_and_units(tmp_path, measured, simulated):
    rows = [row_from_result(measured, verdict="pass"), row_from_result(simulated) | {"mine": 3}]
    paths = [tmp_path / "before.csv", tmp_path / "after.csv"]
    write_csv(paths[0], rows, full=True)
    write_csv(paths[1], rows[1:], full=True)
    frame = read_results(str(paths[0]))
    assert tuple(frame.columns) == (*COLUMNS, "mine")
    assert list(frame["ori peak bytes"]) == [10_501, 2**60 + 8]
    assert frame["memory ratio reached (opt/ori)"][0] == 8000 / 10501
    assert list(frame["memory limit"].isna()) == [False, True]
    assert frame["memory limit bytes"][0] == 8400
    for row, (_, found) in zip(rows, frame.iterrows(), strict=True):
        for column, value in row.items():
            assert pd.isna(found[column]) if value in (None, "") else found[column] == value, column
    # also where a file has nothing in a column
    both = read_results(paths)
    assert list(both["run"]) == [str(paths[0])] * 2 + [str(paths[1])]
    assert both.drop(columns="run").dtypes.equals(frame.dtypes)
    kinds = {str(both.dtypes[column]) for column in COLUMNS}
    assert kinds == {"string", "boolean", "Int64", "Float64"}
    whole = {column for column in COLUMNS if isinstance(rows[0][column], int) and str(both.dtypes[column]) == "Float64"}
    assert whole == set()
    units = both.attrs["units"]
    assert (units["opt-memory"], units["opt-latency"], units["search seconds"]) == ("elements", "ms", "s")
    assert units["opt reserved bytes (measured)"] == "bytes"
    assert units["ori memory error % (of measured)"] == "%"
    assert units["latency ratio low (opt/ori)"] == "opt/ori"
    assert not {"name", "feasible", "ranks", "peak bytes of each rank"} & units.keys()


def test_short_rows_are_read_with_the_types_of_full_ones(tmp_path, measured, simulated):
    rows = [row_from_result(measured, verdict="pass"), row_from_result(simulated, verdict="pass")]
    for name, full in (("short.csv", False), ("full.csv", True)):
        write_csv(tmp_path / name, rows, full=full)
    short, full = read_results(tmp_path / "short.csv"), read_results(tmp_path / "full.csv")
    assert short.equals(full[list(SHORT_COLUMNS)])
    assert len(merge_results([tmp_path / "short.csv"]).rows) == 2
    with (tmp_path / "new.csv").open("a") as stream:
        append_rows(stream, rows)
    assert (tmp_path / "new.csv").read_text() == (tmp_path / "short.csv").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing.csv: No such file"),
        ("", "No columns"),
        ("name,opt-memory\nx,1\n", "no header of results"),
        ("name,opt-memory,ori-memory\nx,much,1\n", "cannot read the results"),
    ],
)
def test_what_is_no_file_of_results_is_refused(tmp_path, content, message):
    path = tmp_path / "missing.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_results([path])
    with pytest.raises(UsageError, match="no file"):
        read_results([])


def refused_kinds(folder):
    """What is no file of results though it has a name: what never ends, what is no file, what is too large, bytes."""
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("fifo")
    (folder / "dangling").symlink_to("nowhere")
    with (folder / "huge").open("wb") as stream:
        stream.truncate(2**40)
    header = ",".join(COLUMNS).encode()
    for name, content in (
        ("binary", bytes(range(256)) * 9),
        ("halves", header + b"\n\xed\xa0\x80" + b"," * (len(COLUMNS) - 1)),
        ("null", b"\0" * 4096),
        ("quote", header + b'\n"a'),
        ("bomb.csv.gz", gzip.compress(header)),
        ("bad.csv.zip", b"PK\x03\x04"),
    ):
        (folder / name).write_bytes(content)
    return [*(folder / name.name for name in folder.iterdir()), Path("/dev/zero"), Path("/dev/tty"), Path("a\0b")]


@pytest.mark.parametrize("read", [read_results, lambda path: merge_results([path])], ids=["read", "merge"])
def test_whatever_the_path_is_of_it_is_one_line(tmp_path, read):
    for path in refused_kinds(tmp_path):
        with pytest.raises(UsageError) as caught:
            read(path)
        assert str(caught.value).isprintable(), path


@pytest.mark.parametrize(("full", "ours"), [(False, SHORT_COLUMNS), (True, COLUMNS)])
def test_further_columns_come_last(tmp_path, measured, full, ours):
    path = tmp_path / "results.csv"
    row = row_from_result(measured)
    write_csv(path, [row, row | {"mine": 3}, row | {"theirs": 'x,"y"\nz'}], full=full)
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == [*ours, "mine", "theirs"]
    assert [(row["mine"], row["theirs"]) for row in rows] == [("", ""), ("3", ""), ("", 'x,"y" z')]


def test_no_rows_are_a_header(tmp_path):
    write_csv(tmp_path / "results.csv", [])
    assert (tmp_path / "results.csv").read_text() == ",".join(SHORT_COLUMNS) + "\n"


def test_appending_writes_the_header_once(tmp_path, measured, simulated):
    path = tmp_path / "results.csv"
    for result in (measured, simulated, measured):
        with path.open("a") as stream:
            append_rows(stream, [row_from_result(result)])
            append_rows(stream, [row_from_result(result)])
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["device"] for row in rows] == ["cpu"] * 2 + ["sim:rtx3090"] * 2 + ["cpu"] * 2


def test_appending_to_other_columns_keeps_them(tmp_path, measured):
    path = tmp_path / "results.csv"
    path.write_text("name,old,opt-memory,ori-memory\nx,1,2,3")  # nor is the last line complete
    with path.open("a") as stream:
        append_rows(stream, [row_from_result(measured)])
    assert path.read_text() == "name,old,opt-memory,ori-memory\nx,1,2,3\nbert,,4000.0,5250.5\n"


def test_a_row_of_ranks_names_each_peak_and_the_terms_of_the_worst(measured):
    def rank(number, predicted, seen):
        terms = (Term("parameters", predicted - 10), Term("gradients", 10)) if predicted else ()
        return RankMemory(
            number, Memory(predicted, predicted) if predicted else None, Memory(seen, seen) if seen else None, terms
        )

    result = replace(measured, samples=21, ranks=(rank(0, 70, 90), rank(1, 80, None), rank(2, None, 60)))
    row = row_from_result(result)
    assert row["peak bytes of each rank"] == "0: 90; 1: 80; 2: 60"
    assert row["predicted peak of the worst rank by terms"] == "parameters 70 + gradients 10"
    assert row["samples per second"] == pytest.approx(21e3 / result.optimized.measured_ms)
    spread = row["samples per second"] * result.optimized.spread_ms / result.optimized.measured_ms
    assert row["samples per second spread"] == pytest.approx(spread)


@pytest.mark.parametrize(
    ("times", "expected"),
    [((), (None, None)), ((3.0,), (3.0, 0.0)), ((4.0, 1.0), (2.5, 1.5)), ((5.0, 1.0, 2.0, 3.0, 4.0), (3.0, 1.0))],
)
def test_median_and_half_the_interquartile_range(times, expected):
    step = StepFigures(Memory(1, 1), 2.0, Memory(1, 1), times)
    assert (step.measured_ms, step.spread_ms) == expected
