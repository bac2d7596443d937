"""`--magis-strict`, and `required=True` of a mark: wins that nobody stored, and limits that no plan meets, are red."""

from __future__ import annotations

import pytest

RUN = ("--magis-models=bert", "--magis-memory-ratios=0.8")
MARKED = """
import pytest

@pytest.mark.magis(memory_ratios=[0.8], strategies=["magis"], required={required})
def test_net(): ...
"""
LEANER = {"opt_tensor": 0.9}
UNMET = {"feasible": False}


def test_a_win_is_red_until_it_is_stored(gate):
    gate.accept(*RUN)
    gate.fake(**{"bert[magis-mem0.8]": LEANER})
    gate(*RUN).assert_outcomes(passed=2)
    result = gate(*RUN, "--magis-strict")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["better: optimized tensor bytes: *", "accept with: pytest * --magis-update=better"])
    result.stdout.fnmatch_lines_random(["bert * FAIL better"])
    gate.accept(*RUN, "--magis-strict", update="better")
    gate(*RUN, "--magis-strict").assert_outcomes(passed=2)


def test_a_limit_that_is_not_met_is_red_and_nothing_can_accept_it(gate):
    gate.fake(**{"bert[magis-mem0.8]": UNMET})
    gate.accept(*RUN)
    gate(*RUN).assert_outcomes(passed=2)
    result = gate(*RUN, "--magis-strict", "--magis-update=new,worse")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["broken: the limit is required and not met: *", "no baseline can accept this"])


def test_in_the_ini_file_it_is_true_or_false(gate):
    gate.fake(**{"bert[magis-mem0.8]": UNMET})
    gate.accept(*RUN)
    (gate.root / "pytest.ini").write_text("[pytest]\nmagis_strict = true\n")
    gate(*RUN).assert_outcomes(passed=1, failed=1)
    (gate.root / "pytest.ini").write_text("[pytest]\nmagis_strict = yes\n")
    assert "--magis-strict: 'yes' is neither true nor false" in gate.refuses(*RUN)


@pytest.mark.parametrize(("required", "outcome"), [("True", "failed"), ("False", "passed"), ("None", "passed")])
def test_a_mark_demands_the_limits_of_its_test(gate, required, outcome):
    (gate.root / "test_memory.py").write_text(MARKED.format(required=required))
    gate.fake(any_case=UNMET)
    result = gate("test_memory.py", "--magis-update=new")
    result.assert_outcomes(**{outcome: 1})


def test_a_mark_that_wants_something_else_is_one_line(gate):
    (gate.root / "test_memory.py").write_text(MARKED.format(required="1"))
    result = gate("test_memory.py")
    assert "magis: required: 1 is neither True nor False" in result.stdout.str()


def test_a_budget_has_its_names_in_the_mark_too(gate):
    (gate.root / "test_memory.py").write_text(MARKED.format(required="None, budget='quick'"))
    gate.accept("test_memory.py")
    assert set(gate.baseline("test_memory.test_net")["configurations"]["small"]["cases"]) == {
        "magis-mem0.8 budget=3000"
    }
