"""--magis-latency-ratios: one case per limit; alone, they replace the memory limits."""

from __future__ import annotations

import pytest

EAGER = "magis::bert[eager]"


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        (["--magis-latency-ratios=1.1"], ["lat1.1"]),
        (["--magis-latency-ratios=1,1.25"], ["lat1", "lat1.25"]),
        (["--magis-latency-ratios=1.1", "--magis-memory-ratios=0.5"], ["mem0.5", "lat1.1"]),
        (["-o", "magis_latency_ratios=1.2"], ["lat1.2"]),
        (["-o", "magis_latency_ratios=1.2", "-o", "magis_memory_ratios=0.7"], ["mem0.7", "lat1.2"]),
        (["-o", "magis_memory_ratios=0.7", "--magis-latency-ratios=1.1"], ["lat1.1"]),
        (["-o", "magis_latency_ratios=1.2", "--magis-memory-ratios=0.7"], ["mem0.7"]),
    ],
)
def test_latency_limits_alone_add_no_memory_limits(gate, node_ids, given, labels):
    result = gate("--collect-only", "-q", "--magis-models=bert", *given)
    assert node_ids(result) == [EAGER, *(f"magis::bert[magis-{label}]" for label in labels)]


@pytest.mark.parametrize("given", ["0.99", "0", "-1", "nan", "inf", "ten", "1,,2"])
def test_bad_ratios_are_refused(gate, given):
    message = gate.refuses("--magis-models=bert", f"--magis-latency-ratios={given}")
    assert message.startswith("ERROR: --magis-latency-ratios: ")


def test_rows_hold_ratio_and_limit(gate, workers):
    gate("--magis-models=bert", "--magis-latency-ratios=1.1", workers=workers)
    row = gate.rows()[1]
    assert (row["latency limit ratio"], row["latency limit"], row["memory limit ratio"]) == ("1.1", "11.0", "")


def test_a_limit_that_the_device_does_not_keep_is_said(gate):
    gate.fake(any_case={"latency": 1.2})
    gate.accept("--magis-models=bert", "--magis-latency-ratios=1.1")
    assert "latency ratio 1.200 is above the limit of 1.1 that was asked for" in gate.rows()[1]["note"]
