"""--magis-memory-tolerance: the share by which memory may exceed its baseline; none by default."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("given", ["-0.01", "nan", "inf", "5%", ""])
def test_bad_tolerances_are_refused(gate, given):
    message = gate.refuses("--magis-models=bert", f"--magis-memory-tolerance={given}")
    assert message.startswith("ERROR: --magis-memory-tolerance")


@pytest.mark.parametrize(
    ("given", "factor", "failed"),
    [
        ([], 1.00001, 2),
        (["--magis-memory-tolerance=0"], 1.00001, 2),
        (["--magis-memory-tolerance=0.005"], 1.004, 0),
        (["--magis-memory-tolerance=0.003"], 1.004, 2),
        (["-o", "magis_memory_tolerance=0.005"], 1.004, 0),
        (["-o", "magis_memory_tolerance=0.005", "--magis-memory-tolerance=0.003"], 1.004, 2),
    ],
)
def test_memory_may_grow_by_that_share(gate, given, factor, failed):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"opt_tensor": factor})
    gate("--magis-models=bert", *given).assert_outcomes(passed=3 - failed, failed=failed)


def test_it_holds_for_the_original_too(gate, workers):
    gate.accept("--magis-models=bert", "--magis-strategies=eager")
    gate.fake(any_case={"ori_tensor": 1.05})
    arguments = ("--magis-models=bert", "--magis-strategies=eager")
    gate(*arguments).assert_outcomes(failed=1)
    gate(*arguments, "--magis-memory-tolerance=0.06", workers=workers).assert_outcomes(passed=1)


def test_the_command_that_accepts_repeats_it(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"ori_tensor": 1.1})
    result = gate("--magis-models=bert", "--magis-memory-tolerance=0.01")
    result.stdout.fnmatch_lines(["accept with: pytest *--magis-memory-tolerance=0.01 --magis-update=*"])
