"""--magis-seed: seeds models, batches and searches; another seed is another case to compare with."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("given", ["-1", "1.5", "x", ""])
def test_bad_seeds_are_refused(gate, given):
    assert gate.refuses("--magis-models=bert", f"--magis-seed={given}").startswith("ERROR: --magis-seed")


def test_the_ini_file_is_checked_too(gate, workers):
    message = gate.refuses("--magis-models=bert", "-o", "magis_seed=-1", workers=workers)
    assert message == "ERROR: --magis-seed: '-1' is not a whole number that is at least 0"


def test_another_seed_is_another_case(gate, workers):
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-seed=0").assert_outcomes(passed=3)
    gate("--magis-models=bert", "--magis-seed=7", workers=workers).assert_outcomes(failed=3)
    gate.accept("--magis-models=bert", "--magis-seed=7")
    assert "magis-mem0.8 seed=7" in gate.baseline()["configurations"]["small"]["cases"]
