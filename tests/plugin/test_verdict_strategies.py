"""The verdict on steps in parts, and on strategies other than plans: their margins, predicted and measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from magis.results import CaseResult, Memory
from tests.plugin.verdicts import ELSEWHERE, check, compare, result


def ranked(strategy: str = "zero1", *, measured: int = 700, peak: int = 0, **changes: object) -> CaseResult:
    """Tensor bytes predicted as 700, and measured."""
    made = result(strategy=strategy, memory_ratio=None, opt=(700, 750))
    optimized = replace(made.optimized, measured=Memory(measured, peak or measured + 50))
    return replace(made, optimized=optimized, **changes)


@pytest.mark.parametrize(("measured", "off_by", "sound"), [(707, 0.02, True), (720, 0.02, False), (701, 0.0, False)])
def test_predicted_bytes_are_within_the_margin_of_the_strategy(measured: int, off_by: float, *, sound: bool) -> None:
    now = ranked(measured=measured, off_by=off_by)
    if sound:
        check(compare(now, now), "pass", passed=True)
    else:
        check(compare(now, now), "FAIL broken", "broken", passed=False)


def test_the_wider_of_the_margin_and_the_tolerance_counts() -> None:
    now = ranked(measured=720, off_by=0.02)  # 2.8% off
    check(compare(now, now, memory=0.03), "pass", passed=True)
    check(compare(now, now, memory=0.025), "FAIL broken", "broken", passed=False)
    check(compare(replace(now, off_by=0.03), replace(now, off_by=0.03), memory=0.02), "pass", passed=True)


def test_an_estimate_that_is_not_judged_may_be_anything() -> None:
    now = ranked("compile", measured=100, off_by=math.inf)
    check(compare(now, now), "pass", passed=True)


def test_plans_have_no_margin() -> None:
    now = ranked("magis+amp", measured=701, off_by=0.5)
    check(compare(now, now), "FAIL broken", "broken", passed=False)


def test_scratch_of_other_strategies_is_not_simulated() -> None:
    now = ranked("ort", peak=990)
    check(compare(now, now), "pass", passed=True)
    plan = ranked("magis", peak=990)
    check(compare(plan, plan), "FAIL broken", "broken", passed=False)


@pytest.mark.parametrize(("now", "label"), [(1049, "pass"), (1051, "FAIL worse"), (951, "pass"), (949, "pass, better")])
def test_peaks_that_differ_from_run_to_run_have_slack_in_both_directions(now: int, label: str) -> None:
    before = ranked(peak=1000, noise=0.05)
    kinds = {"FAIL worse": ("worse",), "pass, better": ("better",)}.get(label, ())
    check(compare(ranked(peak=now, noise=0.05), before), label, *kinds, passed=label != "FAIL worse")
    if label == "pass":
        assert compare(ranked(peak=now), before).findings, "without noise, it is a finding"


def test_tensors_that_other_machines_need_not_share_are_not_compared_there() -> None:
    before = ranked("compile", off_by=math.inf, portable=False)
    grown = ranked("compile", measured=800, off_by=math.inf, portable=False)
    check(compare(grown, before), "FAIL worse", "worse", passed=False)
    check(compare(replace(grown, identity=ELSEWHERE), before), "pass", passed=True)
    check(compare(replace(grown, identity=ELSEWHERE, portable=True), before), "FAIL worse", "worse", passed=False)


def test_other_numbers_fail_whatever_the_strategy() -> None:
    now = replace(ranked(), numbers="differs: loss by 7% of that of one rank")
    check(compare(now, now), "FAIL broken", "broken", passed=False)


def test_only_measured_peaks_have_that_slack_not_tensors_nor_predictions() -> None:
    before = ranked(noise=0.05)
    check(compare(ranked(measured=701, noise=0.05, off_by=0.02), before), "FAIL worse", "worse", passed=False)
    predicted = replace(before, optimized=replace(before.optimized, measured=None))
    more = replace(predicted, optimized=replace(predicted.optimized, simulated=Memory(700, 760)))
    assert compare(more, predicted).findings


# steps in parts

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
