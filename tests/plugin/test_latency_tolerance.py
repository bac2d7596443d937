"""--magis-latency-tolerance: the share by which the latency ratio may exceed its baseline; 0.04 by default."""

from __future__ import annotations

import pytest

ARGUMENTS = ("--magis-models=bert", "--magis-strategies=magis")


@pytest.mark.parametrize("given", ["-0.01", "nan", "inf", "5%", ""])
def test_bad_tolerances_are_refused(gate, given):
    message = gate.refuses("--magis-models=bert", f"--magis-latency-tolerance={given}")
    assert message.startswith("ERROR: --magis-latency-tolerance")


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


def test_a_slow_down_is_red_in_one_line(gate, workers):
    gate.accept(*ARGUMENTS)
    gate.fake(**{"bert[magis-mem0.8]": {"latency": 1.122}})
    result = gate(*ARGUMENTS, workers=workers)
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
