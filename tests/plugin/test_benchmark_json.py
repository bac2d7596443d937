"""`--magis-benchmark-json`: read by pytest-benchmark's own comparison."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

RUN = ("--magis-models=bert", "--magis-benchmark-json=latencies.json")


def test_pytest_benchmark_reads_and_compares_it(gate, workers):
    gate.accept("--magis-models=bert")
    result = gate(*RUN, workers=workers)
    result.stdout.fnmatch_lines(["benchmarks: *latencies.json (3 of 3 cases)"])
    program = "from pytest_benchmark.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "compare", "latencies.json", "--columns=min,median,rounds", "--csv=out.csv"],
        cwd=gate.root, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bert[magis-mem0.8]" in done.stdout
    assert "(time in ms)" in done.stdout
    assert (gate.root / "out.csv").read_text().count("magis::bert[") == 3


def test_seconds_and_bytes_are_those_of_the_rows(gate):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.6]": {"raise": "no"}})
    gate(*RUN)
    data = json.loads((gate.root / "latencies.json").read_text())
    eager, optimized = data["benchmarks"]
    row = gate.rows()[1]
    assert (eager["name"], optimized["fullname"]) == ("bert[eager]", "magis::bert[magis-mem0.8]")
    stats = optimized["stats"]
    assert stats["median"] == pytest.approx(float(row["opt-latency"]) / 1000)
    assert stats["min"] == stats["q1"] < stats["median"] < stats["q3"] == stats["max"]
    assert stats["ops"] == pytest.approx(1 / stats["mean"])
    assert stats["rounds"] == 15
    assert optimized["extra_info"]["optimized_peak_bytes"] == int(row["opt peak bytes"])
    assert optimized["extra_info"]["simulated"] is False


def test_a_place_that_cannot_be_written_is_refused(gate):
    assert "no such directory" in gate.refuses("--magis-models=bert", "--magis-benchmark-json=missing/x.json")
