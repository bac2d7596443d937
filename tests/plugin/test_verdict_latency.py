"""The verdict on latency: whole intervals, and what the baseline's own interval counts for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from magis.results import RatioInterval
from pytest_magis.baselines import stored_case, updated
from pytest_magis.verdict import Tolerances, Verdict, judge
from tests.plugin.verdicts import check, compare, result

ROUNDING = 0.51 * 10**-4
"""Of a stored ratio, either way; the sums below are those of the verdict, to the last bit."""


def latency(low: float, high: float, *, end: float | None, tolerance: float = 0.04) -> Verdict:
    """The verdict on an interval against a baseline of 1.0 whose own interval ends at `end`."""
    now = replace(result(), ratio=RatioInterval((low + high) / 2, low, high, 15))
    before = updated(None, "bert", "label", now.case, result(ratio=1.0, half=0.0))
    stored = stored_case(before, "label", now.case)
    assert stored is not None
    measured = {key: replace(each, latency_ratio_high=end) for key, each in stored.measured.items()}
    return judge(now, replace(stored, measured=measured), tolerances=Tolerances(latency=tolerance))


@pytest.mark.parametrize("end", [None, 0.9, 1.02, 1.0401, 1.06, 3.0])
def test_the_interval_of_the_baseline_counts_nothing(end):
    edge = 1.04 + ROUNDING
    assert latency(edge, 1.2, end=end).passed
    verdict = latency(math.nextafter(edge, 2), 1.2, end=end)
    check(verdict, "FAIL worse", "worse", passed=False)
    assert ", allowed 1.040 (baseline 1 + 0.04), +" in verdict.findings[0].text


@pytest.mark.parametrize(
    ("low", "high", "noted"),
    [
        (0.72, 1.52, True),
        (1.02, 1.08, True),
        (1.03, 1.07, False),  # narrow enough to decide
        (0.97, 1.04, False),  # wide, but all of it is allowed
        (0.80, 0.95, False),  # better
    ],
)
def test_what_passes_undecided_is_said(low, high, noted):
    verdict = latency(low, high, end=None)
    assert verdict.passed
    text = f"latency ratio (opt/ori): {(low + high) / 2:.3f} [{low:.3f}, {high:.3f}] is too uncertain to gate"
    assert [note.startswith(text) for note in verdict.notes] == ([True] if noted else [])


def test_a_row_that_was_stopped_says_nothing_about_its_latency():
    before, stopped = result(ratio=1.0), result(ratio=1.06, half=0.3, stopped=True)
    assert any("too uncertain" in note for note in compare(result(ratio=1.06, half=0.3), before).notes)
    assert compare(stopped, before).notes == ("stopped by the cap in seconds: the optimized step is not gated",)


@pytest.mark.parametrize("end", [None, 1.02, 3.0])
def test_better_needs_the_whole_interval_below_the_tolerance(end):
    edge = 1.0 * (1 - 0.04) - ROUNDING
    assert latency(0.9, edge, end=end).label == "pass"
    verdict = latency(0.9, math.nextafter(edge, 0), end=end)
    check(verdict, "pass, better", "better", passed=True)
    assert verdict.findings[0].text == "latency ratio (opt/ori): 0.930 [0.900, 0.960], baseline 1, -7.0%"


def test_without_tolerance_the_interval_of_the_baseline_counts_nothing():
    assert latency(1.0 + ROUNDING, 1.2, end=1.2, tolerance=0.0).passed
    assert not latency(math.nextafter(1.0 + ROUNDING, 2), 1.2, end=1.2, tolerance=0.0).passed


@pytest.mark.parametrize("half", [0.01, 0.02, 0.04, 0.05, 0.06, 0.08, 0.5])
def test_a_tenth_above_the_stored_ratio_is_red_if_measured_to_within_a_fiftieth(half):
    for ratio in (0.9, 1.0, 1.1):
        before = result(ratio=ratio, half=half * ratio)
        assert not compare(result(ratio=1.1 * ratio, half=0.02 * ratio), before).passed
        assert compare(result(ratio=ratio, half=0.02 * ratio), before).passed
