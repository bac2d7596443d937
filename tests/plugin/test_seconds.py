"""--magis-seconds: a cap on each search. What it stops depends on the machine's speed, so it is not gated."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon", ""])
def test_bad_caps_are_refused(gate, given):
    assert gate.refuses("--magis-models=bert", f"--magis-seconds={given}").startswith("ERROR: --magis-seconds")


def test_the_ini_file_is_checked_too(gate, workers):
    message = gate.refuses("--magis-models=bert", "-o", "magis_seconds=0", workers=workers)
    assert message == "ERROR: --magis-seconds: '0' is not a number of seconds above 0"


def test_a_row_that_was_stopped_says_so_and_is_not_gated(gate, workers):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.8]": {"stopped": True, "opt_tensor": 1.005, "latency": 3}})
    result = gate("--magis-models=bert", "--magis-seconds=9", workers=workers)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*stopped by the cap in seconds: the optimized step is not gated"])
    assert [row["verdict"] for row in gate.rows()] == ["pass", "not gated", "pass"]
    assert [row["stopped by seconds"] for row in gate.rows()] == ["False", "True", "False"]


def test_a_cap_that_stopped_nothing_changes_nothing(gate):
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-seconds=600").assert_outcomes(passed=3)


def test_what_was_stopped_is_never_stored(gate):
    gate.fake(any_case={"stopped": True})
    result = gate("--magis-models=bert", "--magis-strategies=magis", "--magis-update=new,better,worse")
    result.assert_outcomes(passed=2)
    assert not (gate.root / "baselines").exists()


def test_the_original_is_gated_even_then(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"stopped": True, "ori_tensor": 1.1})
    result = gate("--magis-models=bert", "--magis-seconds=9", "--magis-strategies=magis", "--magis-update=worse")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["worse: original tensor bytes: *", "accept with: *"])
    result.stdout.no_fnmatch_line("accept with: *--magis-seconds*")


def test_a_step_that_is_wrong_is_red_even_then(gate):
    gate.fake(any_case={"stopped": True, "numbers": "differs: loss"})
    gate("--magis-models=bert", "--magis-strategies=magis").assert_outcomes(failed=2)
