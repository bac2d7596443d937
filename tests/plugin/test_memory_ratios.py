"""--magis-memory-ratios: one case per limit."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ([], ["mem0.8", "mem0.6"]),
        (["--magis-memory-ratios=0.5"], ["mem0.5"]),
        (["--magis-memory-ratios=0.5,1,.25"], ["mem0.5", "mem1", "mem0.25"]),
        (["--magis-memory-ratios=0.5", "--magis-memory-ratios=0.50,0.4"], ["mem0.5", "mem0.4"]),
        (["-o", "magis_memory_ratios=0.7"], ["mem0.7"]),
        (["-o", "magis_memory_ratios=0.7", "--magis-memory-ratios=0.9"], ["mem0.9"]),
    ],
)
def test_ratios_make_cases(gate, node_ids, given, labels):
    result = gate("--collect-only", "-q", "--magis-models=bert", *given)
    assert node_ids(result) == ["magis::bert[eager]", *(f"magis::bert[magis-{label}]" for label in labels)]


@pytest.mark.parametrize(
    "given", ["0", "-0.1", "1.01", "80", "nan", "inf", "0,8", "80%", "half", "", "1e400", "1e-999"]
)
def test_bad_ratios_are_refused(gate, given):
    message = gate.refuses("--magis-models=bert", f"--magis-memory-ratios={given}")
    assert message.startswith("ERROR: --magis-memory-ratios: ")


def test_the_ini_file_is_checked_too(gate, workers):
    message = gate.refuses("--magis-models=bert", "-o", "magis_memory_ratios=2", workers=workers)
    assert message == "ERROR: --magis-memory-ratios: '2' is not a number above 0 and at most 1"


def test_rows_hold_ratio_and_limit(gate):
    gate("--magis-models=bert", "--magis-memory-ratios=0.8,0.3")
    eager, first, second = gate.rows()
    assert (eager["memory limit ratio"], eager["memory limit"]) == ("", "")
    assert (first["memory limit ratio"], second["memory limit ratio"]) == ("0.8", "0.3")
    for row, ratio in ((first, 0.8), (second, 0.3)):
        assert int(row["memory limit bytes"]) == int(ratio * int(row["ori peak bytes"]))
        assert float(row["memory limit"]) == int(row["memory limit bytes"]) / 4


def test_a_peak_above_the_limit_is_red_and_nothing_accepts_it(gate, workers):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.6]": {"opt_tensor": 1.1}})
    files = gate.files()
    result = gate("--magis-models=bert", "--magis-update=new,better,worse", workers=workers)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["broken: optimized peak bytes above the memory limit: *allowed *+*%", "no baseline can accept this"]
    )
    assert {name for name in files if files[name] != gate.files()[name]} <= {"results.csv", "calls.txt"}


def test_an_infeasible_limit_must_be_accepted_once(gate, workers):
    gate.fake(**{"bert[magis-mem0.2]": {"feasible": False}})
    arguments = ("--magis-models=bert", "--magis-memory-ratios=0.2")
    result = gate(*arguments)
    result.stdout.fnmatch_lines(["note: infeasible, proven: the lower bound * exceeds the limit *"])
    result.assert_outcomes(failed=2)
    gate.accept(*arguments)
    result = gate(*arguments, workers=workers)
    result.assert_outcomes(passed=2)
    assert [row["verdict"] for row in gate.rows()] == ["pass", "infeasible, proven"]
    assert gate.rows()[1]["feasible"] == "False"


def test_a_limit_no_longer_met_is_red_and_one_met_again_is_better(gate):
    gate.accept("--magis-models=bert", "--magis-memory-ratios=0.8")
    gate.fake(**{"bert[magis-mem0.8]": {"feasible": False}})
    result = gate("--magis-models=bert", "--magis-memory-ratios=0.8")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["worse: the limit is no longer met: *", "accept with: pytest *--magis-update=worse"])
    gate.accept("--magis-models=bert", "--magis-memory-ratios=0.8", update="worse")
    gate.fake()
    result = gate("--magis-models=bert", "--magis-memory-ratios=0.8")
    result.assert_outcomes(passed=2)
    assert gate.rows()[1]["verdict"] == "pass, better"
