"""--magis-strategies: what each model is run under."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ([], ["eager", "magis-mem0.8", "magis-mem0.6"]),
        (["--magis-strategies=magis"], ["magis-mem0.8", "magis-mem0.6"]),
        (["--magis-strategies=checkpoint,eager"], ["checkpoint", "eager"]),
        (["--magis-strategies=eager", "--magis-strategies=checkpoint"], ["eager", "checkpoint"]),
        (["-o", "magis_strategies=checkpoint"], ["checkpoint"]),
    ],
)
def test_strategies_contribute_cases(gate, node_ids, given, labels):
    result = gate("--collect-only", "-q", "--magis-models=bert", *given)
    assert node_ids(result) == [f"magis::bert[{label}]" for label in labels]


def test_checkpointing_is_gated_like_the_others(gate, workers):
    arguments = ("--magis-models=bert", "--magis-strategies=checkpoint")
    gate.accept(*arguments)
    gate.fake(any_case={"opt_tensor": 1.01})
    result = gate(*arguments, workers=workers)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["worse: optimized tensor bytes: *, +1.0%"])
    assert gate.rows()[0]["strategy"] == "checkpoint"


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ("zero*", ["zero1-x4", "zero2-x4", "zero3-x4"]),
        ("amp+checkpoint+offload", ["amp+checkpoint+offload"]),
        ("*checkpoint", ["checkpoint", "selective-checkpoint"]),
        ("ddp,zero1,d*", ["ddp-x4", "zero1-x4"]),
        ("amp+tp4", ["amp+tp4-x4"]),
    ],
)
def test_patterns_and_combinations(gate, node_ids, given, labels):
    assert node_ids(collected(gate, given)) == [f"magis::bert[{label}]" for label in labels]


def collected(gate, strategies, *more):
    return gate("--collect-only", "-q", "--magis-models=bert", f"--magis-strategies={strategies}", *more)


@pytest.mark.parametrize(("asked", "outcome"), [("che*", {"skipped": 1}), ("checkpoint", {"failed": 1})])
def test_what_only_a_pattern_asks_for_is_skipped_where_it_is_not_for_the_model(gate, asked, outcome, workers):
    gate.fake(any_case={"raise": "3 heads cannot be cut into 2"})
    result = gate("-rs", "--magis-models=bert", f"--magis-strategies={asked}", workers=workers)
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*3 heads cannot be cut into 2*"])
    assert result.ret == (0 if asked == "che*" else 1)


def test_strategies_are_set_beside_each_other_leanest_first(gate):
    gate.fake(**{"bert[checkpoint]": {"opt_peak": 0.5, "opt_tensor": 0.5}})
    result = gate("--magis-models=bert", "--magis-strategies=eager,checkpoint,magis", "--magis-memory-ratios=0.8")
    lines = result.outlines
    head = next(index for index, line in enumerate(lines) if line.startswith("strategy "))
    assert lines[head - 1] == "bert:"  # the made-up core tells no samples
    assert [line.split()[0] for line in lines[head + 1 : head + 4]] == ["checkpoint", "magis-mem0.8", "eager"]
    eager = lines[head + 3].split()
    assert eager[1] == "1"
    assert eager[4] == "1.000"
    assert all(line.endswith("measured") for line in lines[head + 1 : head + 4])


def test_the_csv_says_ranks_and_whether_figures_are_predicted(gate):
    gate(
        "--magis-models=bert",
        "--magis-strategies=ddp,amp",
        "--magis-ranks=2",
        "--magis-device=sim:rtx3090",
        "--magis-csv-full",
    )
    rows = {row["strategy"]: row for row in gate.rows()}
    assert rows["ddp"]["ranks"] == "2"
    assert rows["amp"]["ranks"] == "1"
    assert {row["figures"] for row in rows.values()} == {"predicted"}
    gate("--magis-models=bert", "--magis-strategies=amp", "--magis-csv-full")
    assert gate.rows()[0]["figures"] == "measured"


def test_latency_is_rough_where_it_is_only_shown(gate):
    gate.extend_conftest(
        """
@pytest.hookimpl(wrapper=True, specname="pytest_magis_run_case")
def pytest_magis_roughness(case, config, latency_bounds, rough):
    with (config.rootpath / "rough.txt").open("a") as log:
        log.write(f"{label_of(case)} {rough} {len(latency_bounds)}\\n")
    return (yield)
"""
    )

    def told(*options):
        log = gate.root / "rough.txt"
        log.unlink(missing_ok=True)
        gate("--magis-models=bert", "--magis-strategies=magis,checkpoint", "--magis-memory-ratios=0.8", *options)
        return set(log.read_text().splitlines())

    assert told() == {"magis-mem0.8 False 0", "checkpoint True 0"}
    assert told("--magis-update=new") == {"magis-mem0.8 False 0", "checkpoint False 0"}
    assert told() == {"magis-mem0.8 False 2", "checkpoint False 2"}, "the baseline's bounds"
