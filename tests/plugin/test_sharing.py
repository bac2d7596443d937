"""--magis-processes and --magis-resume: how a search is computed, not what it finds."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("given", ["0", "-2", "two", "1.5"])
def test_bad_numbers_of_processes_are_refused(gate, given):
    message = gate.refuses("--magis-models=bert", f"--magis-processes={given}")
    assert message == f"ERROR: --magis-processes: {given!r} is not a whole number that is at least 1"


def test_a_folder_that_cannot_be_is_refused(gate):
    (gate.root / "file").write_text("mine")
    assert "file is not a directory" in gate.refuses("--magis-models=bert", "--magis-resume=file")
    assert gate.refuses("--magis-models=bert", "--magis-resume=/proc/nowhere").startswith("ERROR: --magis-resume")
    assert (gate.root / "file").read_text() == "mine"


def test_neither_is_part_of_a_case(gate):
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-processes=3", "--magis-resume=kept").assert_outcomes(passed=3)
