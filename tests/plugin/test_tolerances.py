"""--magis-memory-tolerance and --magis-latency-tolerance: shares by which a figure may exceed its baseline."""

from __future__ import annotations

import pytest


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


def test_it_holds_for_the_original_too(gate):
    gate.accept("--magis-models=bert", "--magis-strategies=eager")
    gate.fake(any_case={"ori_tensor": 1.05})
    arguments = ("--magis-models=bert", "--magis-strategies=eager")
    gate(*arguments).assert_outcomes(failed=1)
    gate(*arguments, "--magis-memory-tolerance=0.06").assert_outcomes(passed=1)


def test_the_command_that_accepts_repeats_it(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"ori_tensor": 1.1})
    result = gate("--magis-models=bert", "--magis-memory-tolerance=0.01")
    result.stdout.fnmatch_lines(["accept with: pytest *--magis-memory-tolerance=0.01 --magis-update=*"])


ARGUMENTS = ("--magis-models=bert", "--magis-strategies=magis")


@pytest.mark.parametrize(
    ("given", "latency", "half_interval", "failed"),
    [
        ([], 1.09, 0.01, 2),  # 1.02 * 1.04 = 1.0608 < 1.08
        ([], 1.09, 0.03, 0),  # the interval reaches down to 1.06: it may be noise
        ([], 1.07, 0.01, 0),
        (["--magis-latency-tolerance=0.10"], 1.09, 0.01, 0),
        (["--magis-latency-tolerance=0"], 1.04, 0.01, 2),
        (["-o", "magis_latency_tolerance=0.1"], 1.09, 0.01, 0),
    ],
)
def test_red_only_if_the_whole_interval_is_above(gate, given, latency, half_interval, failed):
    gate.accept(*ARGUMENTS)
    gate.fake(any_case={"latency": latency, "half_interval": half_interval})
    gate(*ARGUMENTS, *given).assert_outcomes(passed=2 - failed, failed=failed)


def test_a_slow_down_is_red_in_one_line(gate):
    gate.accept(*ARGUMENTS)
    gate.fake(**{"bert[magis-mem0.8]": {"latency": 1.122}})
    result = gate(*ARGUMENTS)
    result.assert_outcomes(passed=1, failed=1)
    expected = "worse: latency ratio (opt/ori): 1.122 [[]1.112, 1.132], allowed 1.061 (baseline 1.02 + 0.04), +5.8%"
    result.stdout.fnmatch_lines([expected])


def test_a_speed_up_passes_and_says_how_to_keep_it(gate):
    gate.accept(*ARGUMENTS)
    gate.fake(any_case={"latency": 0.9})
    result = gate(*ARGUMENTS)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*better: latency ratio (opt/ori): 0.900 *", "accept everything *=better"])
    gate.accept(*ARGUMENTS, update="better")
    gate.fake()
    gate(*ARGUMENTS).assert_outcomes(failed=2)
