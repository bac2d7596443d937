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


@pytest.mark.parametrize(("required", "outcome"), [("True", "failed"), ("False", "passed"), ("None", "passed")])
def test_a_mark_demands_the_limits_of_its_test(gate, required, outcome):
    (gate.root / "test_memory.py").write_text(MARKED.format(required=required))
    gate.fake(any_case=UNMET)
    result = gate("test_memory.py", "--magis-update=new")
    result.assert_outcomes(**{outcome: 1})
