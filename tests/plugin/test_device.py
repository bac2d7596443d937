"""--magis-device: where cases run, and where their baselines are."""

from __future__ import annotations


def test_simulated_rows_are_gated_on_every_machine(gate):
    arguments = ("--magis-models=bert", "--magis-device=sim:rtx3090")
    gate.accept(*arguments)
    assert (gate.root / "baselines" / "sim-rtx3090" / "bert.json").is_file()
    gate.fake(any_case={"identity": "neon", "opt_peak": 1.001})
    result = gate(*arguments)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["worse: optimized peak bytes: *"])
    assert gate.rows()[0]["opt-is-prof-result"] == "False"


SIMULATED = ("--magis-models=bert", "--magis-device=sim:rtx3090")


def test_a_simulated_latency_is_gated_exactly_within_a_hundredth(gate):
    arguments = (*SIMULATED, "--magis-strategies=magis")
    gate.accept(*arguments)
    gate.fake(any_case={"latency": 1.02 * 1.0099})
    gate(*arguments).assert_outcomes(passed=2)
    gate.fake(any_case={"latency": 1.02 * 1.0102})
    result = gate(*arguments)
    result.assert_outcomes(failed=2)
    allowed = "allowed 10,302,000 ns (10.3 ms) (baseline 10,200,000 + 0.01), +0.02%; their ratio (opt/ori) +0.02%"
    result.stdout.fnmatch_lines([f"worse: optimized simulated latency: 10,304,040 ns (10.3 ms), {allowed}"])
    gate(*arguments, "--magis-latency-tolerance=0.04").assert_outcomes(passed=2)
    gate.fake(any_case={"latency": 1.0201})
    gate(*arguments, "--magis-latency-tolerance=0").assert_outcomes(failed=2)


def test_a_simulated_step_that_gets_slower_alike_is_seen_although_the_ratio_stays(gate):
    gate.accept(*SIMULATED)
    gate.fake(any_case={"milliseconds": 10.3})
    result = gate(*SIMULATED)
    result.assert_outcomes(failed=3)
    allowed = "allowed 10,100,000 ns (10.1 ms) (baseline 10,000,000 + 0.01), +2.0%"
    text = f"worse: original simulated latency: 10,300,000 ns (10.3 ms), {allowed}"
    found = [line for line in result.outlines if line.startswith("worse: ")]
    assert found == [text, f"{text}; optimized +2.0%", f"{text}; optimized +2.0%"]
    result.stdout.fnmatch_lines(["accept everything that can be: pytest * --magis-update=worse"])
    gate.fake(any_case={"milliseconds": 10.1})
    gate(*SIMULATED).assert_outcomes(passed=3)
    gate.fake(any_case={"milliseconds": 9.0})
    result = gate(*SIMULATED)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["*better: original simulated latency: 9,000,000 ns (9.00 ms), baseline 10,000,000 ns*"]
    )


def test_a_machine_that_is_slower_is_no_regression(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"milliseconds": 20.0})
    gate("--magis-models=bert").assert_outcomes(passed=3)
    text = str(gate.baseline())
    assert "latency_ns" not in text
    assert "constants" not in text
