"""The verdict on techniques other than plans: their own margins for what is predicted and for what is measured anew."""

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
def test_predicted_bytes_are_within_the_margin_of_the_technique(measured: int, off_by: float, *, sound: bool) -> None:
    now = ranked(measured=measured, off_by=off_by)
    if sound:
        check(compare(now, now), "pass", passed=True)
    else:
        check(compare(now, now), "FAIL broken", "broken", passed=False)


def test_an_estimate_that_is_not_judged_may_be_anything() -> None:
    now = ranked("compile", measured=100, off_by=math.inf)
    check(compare(now, now), "pass", passed=True)


def test_plans_have_no_margin() -> None:
    now = ranked("magis+amp", measured=701, off_by=0.5)
    check(compare(now, now), "FAIL broken", "broken", passed=False)


def test_scratch_of_other_techniques_is_not_simulated() -> None:
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


def test_other_numbers_fail_whatever_the_technique() -> None:
    now = replace(ranked(), numbers="differs: loss by 7% of that of one rank")
    check(compare(now, now), "FAIL broken", "broken", passed=False)


def test_only_measured_peaks_have_that_slack_not_tensors_nor_predictions() -> None:
    before = ranked(noise=0.05)
    check(compare(ranked(measured=701, noise=0.05, off_by=0.02), before), "FAIL worse", "worse", passed=False)
    predicted = replace(before, optimized=replace(before.optimized, measured=None))
    more = replace(predicted, optimized=replace(predicted.optimized, simulated=Memory(700, 760)))
    assert compare(more, predicted).findings
