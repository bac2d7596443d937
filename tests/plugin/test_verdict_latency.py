"""The verdict on latency: whole intervals, and what the baseline's own interval counts for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from magis.results import CaseResult, RatioInterval
from pytest_magis.baselines import simulated_ns, stored_case, updated
from pytest_magis.findings import Tolerances
from pytest_magis.verdict import Verdict, judge
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


@pytest.mark.parametrize(("halved", "noted"), [(None, False), (1.02, False), (1.06, False), (1.08, True), (1.5, True)])
def test_a_plan_that_a_slow_link_would_slow_says_so(halved, noted):
    now = result()
    now = replace(now, search=replace(now.search, worst_latency_ratio=1.02, halved_latency_ratio=halved))
    text = f"with a link half as fast, the step would take x{halved or 0:.2f} of eager's time"
    found = [note for note in compare(now, result()).notes if "link" in note]
    assert found == ([f"{text}, within the slack at most x1.02; --magis-slack=0.5 plans for that"] if noted else [])


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


# --- a ratio in doubt --------------------------------------------------------------------------------------------

BUSY = "the machine is too busy: threads waited for a core 70% of the time"


def doubtful(ratio: float = 2.81) -> CaseResult:
    made = result(ratio=ratio)
    assert made.ratio is not None
    return replace(made, ratio=replace(made.ratio, doubt=BUSY))


@pytest.mark.parametrize("ratio", [0.5, 1.02, 2.81])
@pytest.mark.parametrize("permissions", ["", "new,better,worse"])
def test_a_ratio_in_doubt_is_not_gated(ratio, permissions):
    verdict = compare(doubtful(ratio), result(), permissions)
    check(verdict, "pass", passed=True)
    assert verdict.notes == (f"latency is not gated: {BUSY}",)
    assert not verdict.store
    assert not compare(replace(doubtful(), original=result(ori=(2000, 2100)).original), result()).passed  # bytes are


def test_a_ratio_in_doubt_is_not_stored_and_added_when_there_is_a_sound_one():
    first = compare(doubtful(), None, "new")
    check(first, "accepted new", "new", passed=True)
    assert first.notes == (f"latency is not gated: {BUSY}",)
    baseline = updated(None, "bert", "label", doubtful().case, doubtful())
    stored = stored_case(baseline, "label", doubtful().case)
    assert stored is not None
    (measured,) = stored.measured.values()
    assert (measured.latency_ratio, measured.latency_ratio_low, measured.latency_ratio_high) == (None, None, None)
    assert not compare(result(), doubtful()).store
    later = compare(result(), doubtful(), "new")
    check(later, "accepted new", passed=True)
    assert later.store
    assert not compare(doubtful(), doubtful(), "new").store


# --- simulated devices: latencies of each step ------------------------------------------------------------------


def simulated(original: float = 10.0, ratio: float = 1.0, **more: Any) -> CaseResult:
    """A simulated result; `original` and, times `ratio`, the optimized step in milliseconds."""
    made = result(device="sim:h200", ratio=1.0, **more)
    steps = {name: replace(getattr(made, name), simulated_ms=original) for name in ("original", "optimized")}
    if made.case.strategy != "eager":
        steps["optimized"] = replace(steps["optimized"], simulated_ms=original * ratio)
    return replace(made, **steps)


@pytest.mark.parametrize("strategy", ["eager", "magis", "checkpoint"])
def test_the_first_nanosecond_above_the_tolerance_is_red(strategy):
    before = simulated(strategy=strategy)
    assert compare(simulated(10.1, strategy=strategy), before).findings == ()
    verdict = compare(simulated(10.100001, strategy=strategy), before)
    check(verdict, "FAIL worse", "worse", passed=False)
    seen = "original simulated latency: 10,100,001 ns (10.1 ms), allowed 10,100,000 ns (10.1 ms)"
    assert verdict.findings[0].text.startswith(f"{seen} (baseline 10,000,000 + 0.01), +9.9e-06%")
    assert ("; optimized +9.9e-06%" in verdict.findings[0].text) == (strategy != "eager")
    assert compare(simulated(10.100001, strategy=strategy), before, "worse").store


def test_the_first_nanosecond_below_is_better():
    assert compare(simulated(9.9), simulated()).findings == ()
    verdict = compare(simulated(9.899999), simulated())
    check(verdict, "pass, better", "better", passed=True)
    expected = "original simulated latency: 9,899,999 ns (9.90 ms), baseline 10,000,000 ns (10.0 ms), -1.0%"
    assert verdict.findings[0].text == f"{expected}; optimized -1.0%"


def test_a_slower_original_does_not_make_the_ratio_an_improvement():
    verdict = compare(simulated(11.0, 1 / 1.1), simulated())
    check(verdict, "FAIL worse", "worse", passed=False)
    assert verdict.needed == ("worse",)


def test_a_faster_original_beside_an_unchanged_step_is_a_worse_ratio():
    verdict = compare(simulated(9.0, 10 / 9), simulated())
    check(verdict, "FAIL worse", "better", "worse", passed=False)
    assert verdict.findings[1].text.startswith("latency ratio (opt/ori): 1.1111, allowed 1.010 (baseline 1 + 0.01)")


def test_a_ratio_can_be_worse_although_neither_step_is():
    verdict = compare(simulated(9.91, 10.09 / 9.91), simulated())
    check(verdict, "FAIL worse", "worse", passed=False)
    assert verdict.findings[0].text.startswith("latency ratio (opt/ori): 1.0182")


def test_of_a_search_that_was_stopped_only_the_original_is_gated():
    assert compare(simulated(10.0, 2.0, stopped=True), simulated()).passed
    verdict = compare(simulated(10.3, 2.0, stopped=True), simulated())
    check(verdict, "FAIL worse", "worse", passed=False)
    assert "optimized" not in verdict.findings[0].text


def test_one_tolerance_for_timed_and_one_for_simulated_latencies():
    assert compare(simulated(10.3), simulated(), simulated_latency=0.03).passed
    assert not compare(simulated(10.3), simulated(), latency=0.5).passed
    assert compare(result(ratio=1.05, half=0.0), result(ratio=1.02, half=0.0), simulated_latency=0.0).passed


@pytest.mark.parametrize("nanoseconds", [0, 1, 999_999, 123_456_789_012_345, 2**52 - 1])
def test_nanoseconds_survive_the_milliseconds_of_results(nanoseconds):
    assert simulated_ns(simulated(nanoseconds / 1e6)) == (nanoseconds, nanoseconds)


def test_a_step_that_is_too_large_for_its_device_keeps_no_latencies():
    made = replace(simulated(), case=replace(result().case, device="cpu"))
    assert simulated_ns(made) is None
    assert simulated_ns(result()) is None
