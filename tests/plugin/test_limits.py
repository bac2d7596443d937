"""--magis-memory-ratios and --magis-latency-ratios: a case for each limit; alone, latency limits replace the others."""

from __future__ import annotations

import pytest


def test_rows_hold_ratio_and_limit(gate):
    gate("--magis-models=bert", "--magis-memory-ratios=0.8,0.3", "--magis-csv-full")
    eager, first, second = gate.rows()
    assert (eager["memory limit ratio"], eager["memory limit"]) == ("", "")
    assert (first["memory limit ratio"], second["memory limit ratio"]) == ("0.8", "0.3")
    for row, ratio in ((first, 0.8), (second, 0.3)):
        assert int(row["memory limit bytes"]) == int(ratio * int(row["ori peak bytes"]))
        assert float(row["memory limit"]) == int(row["memory limit bytes"]) / 4


def test_a_peak_above_the_limit_is_red_and_nothing_accepts_it(gate):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.6]": {"opt_tensor": 1.1}})
    files = gate.files()
    result = gate("--magis-models=bert", "--magis-update=new,better,worse")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["broken: optimized peak bytes above the memory limit: *allowed *+*%", "no baseline can accept this"]
    )
    assert {name for name in files if files[name] != gate.files()[name]} <= {"results.csv", "calls.txt"}


def test_an_infeasible_limit_must_be_accepted_once(gate):
    gate.fake(**{"bert[magis-mem0.2]": {"feasible": False}})
    arguments = ("--magis-models=bert", "--magis-memory-ratios=0.2", "--magis-csv-full")
    result = gate(*arguments)
    result.stdout.fnmatch_lines(["note: infeasible, proven: the lower bound * exceeds the limit *"])
    result.assert_outcomes(failed=2)
    gate.accept(*arguments)
    result = gate(*arguments)
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


EAGER = "magis::bert[eager]"


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ([], ["mem0.8", "mem0.6"]),
        (["--magis-memory-ratios=0.5"], ["mem0.5"]),
        (["--magis-memory-ratios=0.5,1,.25"], ["mem0.5", "mem1", "mem0.25"]),
        (["--magis-memory-ratios=0.5", "--magis-memory-ratios=0.50,0.4"], ["mem0.5", "mem0.4"]),
        (["-o", "magis_memory_ratios=0.7"], ["mem0.7"]),
        (["-o", "magis_memory_ratios=0.7", "--magis-memory-ratios=0.9"], ["mem0.9"]),
        (["--magis-latency-ratios=1.1"], ["lat1.1"]),
        (["--magis-latency-ratios=1,1.25"], ["lat1", "lat1.25"]),
        (["--magis-latency-ratios=1.1", "--magis-memory-ratios=0.5"], ["mem0.5", "lat1.1"]),
        (["-o", "magis_latency_ratios=1.2"], ["lat1.2"]),
        (["-o", "magis_latency_ratios=1.2", "-o", "magis_memory_ratios=0.7"], ["mem0.7", "lat1.2"]),
        (["-o", "magis_memory_ratios=0.7", "--magis-latency-ratios=1.1"], ["lat1.1"]),
        (["-o", "magis_latency_ratios=1.2", "--magis-memory-ratios=0.7"], ["mem0.7"]),
    ],
)
def test_limits_make_cases(gate, node_ids, given, labels):
    result = gate("--collect-only", "-q", "--magis-models=bert", *given)
    assert node_ids(result) == [EAGER, *(f"magis::bert[magis-{label}]" for label in labels)]


def test_rows_hold_latency_ratio_and_limit(gate):
    gate("--magis-models=bert", "--magis-latency-ratios=1.1")
    row = gate.rows()[1]
    assert (row["latency limit ratio"], row["latency limit"], row["memory limit ratio"]) == ("1.1", "11.0", "")


def test_a_limit_that_the_device_does_not_keep_is_said(gate):
    gate.fake(any_case={"latency": 1.2})
    gate.accept("--magis-models=bert", "--magis-latency-ratios=1.1")
    assert "latency ratio 1.200 is above the limit of 1.1 that was asked for" in gate.rows()[1]["note"]
