"""--magis-device: where cases run, and where their baselines are."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tpu", "--magis-device: unknown device 'tpu'; choose from cpu, sim:rtx3090"),
        ("sim:rtx9999", "--magis-device: unknown device 'sim:rtx9999'"),
        ("cuda", "--magis-device: 'cuda' needs a GPU and none was found; use cpu or sim:<name>"),
        ("", "--magis-device is empty"),
    ],
)
def test_devices_that_are_not_there_are_refused(gate, given, message, workers):
    assert message in gate.refuses("--magis-models=bert", f"--magis-device={given}", workers=workers)


def test_the_default_is_the_first_device(gate):
    gate("--magis-models=bert")
    assert {row["device"] for row in gate.rows()} == {"cpu"}


def test_the_ini_file_names_a_device(gate):
    gate("--magis-models=bert", "-o", "magis_device=sim:rtx3090")
    assert {row["device"] for row in gate.rows()} == {"sim:rtx3090"}


def test_simulated_rows_are_gated_on_every_machine(gate, workers):
    arguments = ("--magis-models=bert", "--magis-device=sim:rtx3090")
    gate.accept(*arguments)
    assert (gate.root / "baselines" / "sim-rtx3090" / "bert.json").is_file()
    gate.fake(any_case={"identity": "neon", "opt_peak": 1.001})
    result = gate(*arguments, workers=workers)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["worse: optimized peak bytes: *"])
    assert gate.rows()[0]["opt-is-prof-result"] == "False"


def test_a_simulated_latency_is_gated_exactly_within_the_tolerance(gate):
    arguments = ("--magis-models=bert", "--magis-device=sim:rtx3090", "--magis-strategies=magis")
    gate.accept(*arguments)
    gate.fake(any_case={"latency": 1.02 * 1.039})
    gate(*arguments).assert_outcomes(passed=2)
    gate.fake(any_case={"latency": 1.02 * 1.041})
    result = gate(*arguments)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["worse: latency ratio (opt/ori): 1.0618, allowed 1.061 *"])


def test_devices_do_not_share_baselines(gate):
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-device=sim:rtx3090").assert_outcomes(failed=3)


def test_another_instruction_set_passes_on_tensor_bytes(gate, workers):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"identity": "neon", "opt_peak": 1.005, "latency": 1.9})
    result = gate("--magis-models=bert", workers=workers)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*only tensor bytes are gated: *instruction set=neon*--magis-update=new adds one"])


def test_another_instruction_set_fails_on_tensor_bytes(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"identity": "neon", "opt_tensor": 1.001})
    gate("--magis-models=bert").assert_outcomes(passed=1, failed=2)


def test_a_second_identity_is_added_beside_the_first(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"identity": "neon", "opt_peak": 1.005, "latency": 1.9})
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert").assert_outcomes(passed=3)
    gate.fake(any_case={"identity": "neon", "opt_peak": 1.006})
    gate("--magis-models=bert").assert_outcomes(passed=1, failed=2)
    gate.fake()
    gate("--magis-models=bert").assert_outcomes(passed=3)
    assert [row["verdict"] for row in gate.rows()] == ["pass"] * 3
