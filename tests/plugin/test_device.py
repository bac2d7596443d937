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


def without_latencies(gate):
    """The baseline as it was written before latencies were kept."""
    path = gate.root / "baselines" / "sim-rtx3090" / "bert.json"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "_latency_ns" not in line and '"constants"' not in line]
    assert len(kept) == len(lines) - 3 * 3
    path.write_text("".join(kept).replace(",\n            }", "\n            }"))
    return path


def test_an_older_baseline_without_latencies_still_holds_and_takes_them_over_when_asked(gate):
    gate.accept(*SIMULATED)
    complete = gate.baseline(device="sim-rtx3090")
    path = without_latencies(gate)
    older = path.read_bytes()
    result = gate(*SIMULATED)
    result.assert_outcomes(passed=3)
    advice = "the baseline has no simulated latencies; --magis-update=new adds them"
    result.stdout.fnmatch_lines([f"*eager*: latency is not gated: {advice}"])
    result.stdout.fnmatch_lines([f"*mem0.8*: of latency only the ratio is gated: {advice}"])
    gate.fake(any_case={"milliseconds": 20.0})
    gate(*SIMULATED).assert_outcomes(passed=3)
    gate(*SIMULATED, "--magis-update=better,worse").assert_outcomes(passed=3)
    assert path.read_bytes() == older
    gate.fake(any_case={"latency": 1.05})
    gate(*SIMULATED).assert_outcomes(passed=1, failed=2)
    gate.fake()
    gate.accept(*SIMULATED)
    assert {row["verdict"] for row in gate.rows()} == {"accepted new"}
    assert gate.baseline(device="sim-rtx3090") == complete
    gate.fake(any_case={"milliseconds": 20.0})
    gate(*SIMULATED).assert_outcomes(failed=3)


def test_devices_do_not_share_baselines(gate):
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-device=sim:rtx3090").assert_outcomes(failed=3)


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
