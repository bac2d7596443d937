"""--magis-budget: states that a search may evaluate. Another budget finds another plan: another case to compare."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "many", "", "1e3", "²", "9" * 30])
def test_bad_budgets_are_refused(gate, given):
    assert gate.refuses("--magis-models=bert", f"--magis-budget={given}").startswith("ERROR: --magis-budget")


def test_the_ini_file_is_checked_too(gate, workers):
    message = gate.refuses("--magis-models=bert", "-o", "magis_budget=0", workers=workers)
    assert (
        message
        == "ERROR: --magis-budget: '0' is not a whole number that is at least 1; or name one: quick, default, thorough"
    )


def test_another_budget_is_another_case(gate, workers):
    gate.accept("--magis-models=bert")
    result = gate("--magis-models=bert", "--magis-budget=50")
    result.assert_outcomes(passed=1, failed=2)  # eager searches nothing
    result.stdout.fnmatch_lines(["create it with: pytest *--magis-budget=50 --magis-update=new"])
    gate.accept("--magis-models=bert", "--magis-budget=50")
    gate("--magis-models=bert", "--magis-budget=50", workers=workers).assert_outcomes(passed=3)
    cases = gate.baseline()["configurations"]["small"]["cases"]
    assert sorted(cases) == sorted(
        ["eager"] + [f"magis-mem{ratio}{budget}" for ratio in (0.6, 0.8) for budget in ("", " budget=50")]
    )


def test_names_stand_for_numbers(gate):
    gate.accept("--magis-models=bert", "--magis-strategies=magis", "--magis-budget=quick")
    gate.accept("--magis-models=bert", "--magis-strategies=magis", "--magis-budget=thorough")
    cases = gate.baseline()["configurations"]["small"]["cases"]
    assert {name.partition(" ")[2] for name in cases} == {"budget=3000", "budget=300000"}


def test_the_default_by_name_is_the_same_case_as_without(gate, workers):
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-budget=default", workers=workers).assert_outcomes(passed=3)


@pytest.mark.parametrize("given", ["Quick", "fast", "thorough,quick"])
def test_unknown_names_are_told_the_known_ones(gate, given):
    message = gate.refuses("--magis-models=bert", f"--magis-budget={given}")
    assert message.endswith("; or name one: quick, default, thorough")
