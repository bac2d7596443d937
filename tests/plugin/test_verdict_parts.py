"""What the verdict tells of steps in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magis.results import CaseResult
from tests.plugin.verdicts import check, compare, result

WHY = "native_batch_norm (2 calls: batch statistics couple the batch)"
NOTE = f"nothing runs in parts: {WHY}"


def unsplit(made: CaseResult, why: str = WHY) -> CaseResult:
    return replace(made, search=replace(made.search, unsplit=why))


def test_what_stood_in_the_way_is_noted_and_changes_no_verdict():
    verdict = compare(unsplit(result()), result())
    check(verdict, "pass", passed=True)
    assert verdict.notes == (NOTE,)
    assert compare(result(), unsplit(result())).notes == ()


@pytest.mark.parametrize(
    ("made", "label", "passed"),
    [
        (result(opt=(701, 751)), "FAIL worse", False),
        (result(opt=(699, 749)), "pass, better", True),
        (result(numbers="differs: loss"), "FAIL broken", False),
    ],
)
def test_it_is_noted_with_every_verdict(made, label, passed):
    verdict = compare(unsplit(made), result())
    assert (verdict.label, verdict.passed) == (label, passed)
    assert verdict.notes == (NOTE,)
    assert replace(verdict, notes=()) == replace(compare(made, result()), notes=())


def test_it_comes_before_what_else_is_to_say():
    made = unsplit(result(opt=(900, 950), feasible=False, lower_bound=881))
    verdict = compare(made, made)
    check(verdict, "infeasible, proven", passed=True)
    assert verdict.notes[0] == NOTE
    assert verdict.notes[1].startswith("infeasible, proven: ")


def test_numbers_within_tolerance_are_no_finding():
    """Of a step that sums in another order than eager."""
    made = result(numbers="within tolerance")
    made = replace(made, search=replace(made.search, fission="from its beginning to the loss and back in 2 parts"))
    verdict = compare(made, made)
    check(verdict, "pass", passed=True)
    assert verdict.notes == ()
