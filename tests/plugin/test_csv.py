"""--magis-csv: where the rows of a run go."""

from __future__ import annotations

import pytest

from magis.report import COLUMNS
from magis.report.results_table import SHORT_COLUMNS, case_name, merge_results


def test_the_default_is_in_the_directory_of_the_call(gate, workers, monkeypatch):
    gate.pytester.makeini("[pytest]")  # makes this the root directory, where baselines are
    below = gate.pytester.mkdir("below")
    monkeypatch.chdir(below)
    gate("--magis-models=bert", "--magis-update=new", workers=workers)
    assert [path.name for path in below.iterdir()] == ["results.csv"]
    assert (gate.root / "baselines" / "cpu" / "bert.json").is_file()


@pytest.mark.parametrize("given", [["--magis-csv=out/rows.csv"], ["-o", "magis_csv=out/rows.csv"]])
def test_another_file_can_be_given(gate, given):
    (gate.root / "out").mkdir()
    gate("--magis-models=bert", *given)
    assert len(gate.rows("out/rows.csv")) == 3
    assert not (gate.root / "results.csv").exists()


def test_rows_are_those_of_this_run_in_the_order_of_the_plan(gate, workers):
    gate("--magis-models=vit")
    gate("--magis-models=vit,bert,mlp", workers=workers)
    rows = gate.rows()
    assert [(row["name"], row["strategy"], row["memory limit ratio"]) for row in rows] == [
        (name, *case) for name in ("vit", "bert", "mlp") for case in (("eager", ""), ("magis", "0.8"), ("magis", "0.6"))
    ]
    assert tuple(rows[0]) == SHORT_COLUMNS
    assert len(SHORT_COLUMNS) <= 17 + 12
    assert not [name for name in gate.files() if name.endswith(".tmp")]


@pytest.mark.parametrize("given", [["--magis-csv-full"], ["-o", "magis_csv_full=true"]])
def test_all_columns_are_written_where_they_are_asked_for(gate, given):
    gate.extend_conftest("def pytest_magis_columns(config):\n    return {'mine': lambda result: 3}\n")
    gate("--magis-models=bert", "--magis-csv=short.csv")
    gate("--magis-models=bert", *given)
    short, full = gate.rows("short.csv"), gate.rows()
    assert tuple(short[0]) == (*SHORT_COLUMNS, "mine")
    assert tuple(full[0]) == (*COLUMNS, "mine")
    assert short == [{column: row[column] for column in short[0]} for row in full]


def test_ranks_tell_rows_apart_and_a_short_file_meets_a_full_one(gate):
    options = ("--magis-models=bert", "--magis-strategies=ddp", "--magis-device=sim:rtx3090")
    gate(*options, "--magis-ranks=2", "--magis-csv=two.csv")
    gate(*options, "--magis-ranks=4", "--magis-csv=four.csv")
    gate(*options, "--magis-ranks=4", "--magis-csv=full.csv", "--magis-csv-full")
    merged = merge_results([gate.root / name for name in ("two.csv", "four.csv", "full.csv")])
    assert [case_name(row) for row in merged.rows] == ["bert[ddp-x2]", "bert[ddp-x4]"]
    (full,) = gate.rows("full.csv")
    assert merged.rows[1] == full


def test_runs_agree_byte_for_byte(gate):
    texts = []
    for workers in (0, 0, 2):
        gate("--magis-models=vit,bert,mlp", workers=workers)
        texts.append((gate.root / "results.csv").read_bytes())
    assert texts[0] == texts[1] == texts[2]


def test_no_rows_leave_the_old_file(gate):
    gate("--magis-models=bert")
    before = gate.files()
    gate("--magis-models=bert", "--collect-only")
    assert gate("--magis-models=bert", "-k", "no_such_case").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert gate.files() == before


def test_a_place_that_vanishes_during_the_run_is_one_line_and_an_exit_code(gate):
    gate.accept("--magis-models=bert")
    (gate.root / "out").mkdir()
    gate.pytester.makepyfile(
        test_own="import pathlib, shutil\ndef test_own(): shutil.rmtree(pathlib.Path(__file__).parent / 'out')"
    )
    result = gate("--magis-models=bert", "--magis-csv=out/rows.csv", "test_own.py")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["ERROR: cannot write *out/rows.csv: No such file or directory"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_case_that_could_not_run_has_a_row(gate, workers):
    gate.fake(**{"bert[magis-mem0.8]": {"raise": "a  reason\nof two lines"}, "bert[magis-mem0.6]": {"crash": "boom"}})
    result = gate("--magis-models=bert", "--magis-update=new", workers=workers)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["a reason of two lines", "*RuntimeError: boom"])
    eager, refused, crashed = gate.rows()
    assert (eager["verdict"], refused["verdict"], crashed["verdict"]) == ("accepted new", "ERROR", "ERROR")
    assert (refused["name"], refused["memory limit ratio"], refused["opt-memory"]) == ("bert", "0.8", "")
    assert (refused["note"], crashed["note"]) == ("a reason of two lines", "RuntimeError: boom")
    assert list(gate.baseline()["configurations"]["small"]["cases"]) == ["eager"]
