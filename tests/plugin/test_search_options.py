"""--magis-search, -budget, -seconds, -seed, -processes, -resume and -preset: what is planned, by whom, for how long."""

from __future__ import annotations

import pytest

BERT = "--magis-models=bert"


def test_both_stand_side_by_side(gate):
    gate.accept("--magis-models=bert", "--magis-search=magis,paper")
    result = gate("--magis-models=bert", "--magis-search=magis,paper")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["bert * magis (paper) *mem 0.8*"])
    cases = gate.baseline()["configurations"]["small"]["cases"]
    ours, paper = ([f"{name}-mem{ratio}" for ratio in (0.6, 0.8)] for name in ("magis", "magis-paper"))
    assert sorted(cases) == ["eager", *ours, *paper]
    rows = [(row["strategy"], row["search"], row["memory limit ratio"]) for row in gate.rows()]
    assert rows == [
        ("eager", "magis", ""),
        *(("magis", search, ratio) for search in ("magis", "paper") for ratio in ("0.8", "0.6")),
    ]


def test_the_command_that_accepts_a_case_names_its_search(gate):
    result = gate("--magis-models=bert", "--magis-search=paper", "--magis-memory-ratios=0.8")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["create it with: pytest --magis-models=bert --magis-strategies=magis --magis-search=paper *=new"]
    )


def test_a_row_that_was_stopped_says_so_and_is_not_gated(gate):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.8]": {"stopped": True, "opt_tensor": 1.005, "latency": 3}})
    result = gate("--magis-models=bert", "--magis-seconds=9", "--magis-csv-full")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*stopped by the cap in seconds: the optimized step is not gated"])
    assert [row["verdict"] for row in gate.rows()] == ["pass", "not gated", "pass"]
    assert [row["stopped by seconds"] for row in gate.rows()] == ["False", "True", "False"]


def test_what_was_stopped_is_never_stored(gate):
    gate.fake(any_case={"stopped": True})
    result = gate("--magis-models=bert", "--magis-strategies=magis", "--magis-update=new,better,worse")
    result.assert_outcomes(passed=2)
    assert not (gate.root / "baselines").exists()


def test_the_original_is_gated_even_then(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"stopped": True, "ori_tensor": 1.1})
    result = gate("--magis-models=bert", "--magis-seconds=9", "--magis-strategies=magis", "--magis-update=worse")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["worse: original tensor bytes: *", "accept with: *"])
    result.stdout.no_fnmatch_line("accept with: *--magis-seconds*")


def test_a_step_that_is_wrong_is_red_even_then(gate):
    gate.fake(any_case={"stopped": True, "numbers": "differs: loss"})
    gate("--magis-models=bert", "--magis-strategies=magis").assert_outcomes(failed=2)


@pytest.mark.parametrize(
    ("given", "preset"),
    [
        ([], "small"),
        (["--magis-device=sim:rtx3090"], "paper"),
        (["--magis-device=sim:rtx3090", "--magis-preset=small"], "small"),
        (["--magis-preset=paper"], "paper"),
        (["-o", "magis_preset=paper"], "paper"),
    ],
)
def test_the_default_depends_on_the_device(gate, given, preset):
    gate("--magis-models=bert", *given)
    assert {row["preset"] for row in gate.rows()} == {preset}


@pytest.mark.parametrize(
    ("given", "new", "configurations", "case"),
    [
        ("--magis-seed=7", 3, ["small"], "magis-mem0.8 seed=7"),
        ("--magis-budget=50", 2, ["small"], "magis-mem0.8 budget=50"),  # eager searches nothing
        ("--magis-budget=quick", 2, ["small"], "magis-mem0.8 budget=3000"),
        ("--magis-budget=thorough", 2, ["small"], "magis-mem0.8 budget=300000"),
        ("--magis-preset=paper", 3, ["paper", "small"], "magis-mem0.8"),
        ("--magis-dtype=bfloat16", 3, ["small", "small bfloat16"], "magis-mem0.8"),
    ],
)
def test_another_plan_or_step_is_another_case(gate, given, new, configurations, case):
    gate.accept(BERT)
    result = gate(BERT, given)
    result.assert_outcomes(passed=3 - new, failed=new)
    result.stdout.fnmatch_lines([f"create it with: pytest *{given} --magis-update=new"])
    gate.accept(BERT, given)
    gate(BERT, given).assert_outcomes(passed=3)
    gate(BERT).assert_outcomes(passed=3)
    found = gate.baseline()["configurations"]
    assert sorted(found) == configurations
    assert case in found[configurations[-1]]["cases"]
    assert sum(len(configuration["cases"]) for configuration in found.values()) == 3 + new


@pytest.mark.parametrize(
    "given",
    [
        ("--magis-seed=0",),
        ("--magis-budget=default",),
        ("--magis-slack=0",),  # on a CPU
        ("--magis-seconds=600",),
        ("--magis-processes=3", "--magis-resume=kept"),
    ],
)
def test_what_changes_no_plan_is_no_part_of_a_case(gate, given):
    gate.accept(BERT)
    gate(BERT, *given).assert_outcomes(passed=3)


def test_slack_is_part_of_a_case_where_something_may_be_swapped(gate):
    """Of the planned cases alone: eager is the same with it and without."""
    simulated = (BERT, "--magis-device=sim:rtx3090")
    gate.accept(*simulated)
    gate(*simulated, "--magis-slack=0.2").assert_outcomes(passed=3)
    gate(*simulated, "--magis-slack=0").assert_outcomes(passed=1, failed=2)
    gate.accept(*simulated, "--magis-slack=0")
    (cases,) = (found["cases"] for found in gate.baseline(device="sim-rtx3090")["configurations"].values())
    assert [name for name in cases if "slack" in name] == ["magis-mem0.6 slack=0", "magis-mem0.8 slack=0"]
