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
