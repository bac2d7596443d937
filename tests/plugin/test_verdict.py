"""The verdict: example by example, then as properties over random results."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from magis.results import Case, CaseResult, Memory, RatioInterval, SearchStats, StepFigures
from pytest_magis.baselines import ModelBaseline, identity_key, stored_case, updated
from pytest_magis.verdict import PERMISSIONS, Tolerances, Verdict, judge

HERE = {"instruction set": "avx512", "threads": "2"}
ELSEWHERE = {"instruction set": "neon", "threads": "8"}
ALL = frozenset(PERMISSIONS)


def result(
    *,
    ori: tuple[int, int] = (1000, 1100),
    opt: tuple[int, int] = (700, 750),
    ratio: float | None = 1.02,
    half: float = 0.01,
    device: str = "cpu",
    strategy: str = "magis",
    memory_ratio: float | None = 0.8,
    feasible: bool = True,
    stopped: bool = False,
    numbers: str = "bit-identical",
    identity: dict[str, str] | None = None,
    lower_bound: int = 300,
) -> CaseResult:
    """A result whose simulator is exact. `ori` and `opt` are (tensor bytes, peak bytes)."""
    if strategy == "eager":
        opt, memory_ratio, ratio = ori, None, None
    measured = not device.startswith("sim:")

    def step(bytes_: tuple[int, int], milliseconds: float) -> StepFigures:
        memory = Memory(*bytes_)
        return (
            StepFigures(memory, milliseconds, memory, milliseconds) if measured else StepFigures(memory, milliseconds)
        )

    original = step(ori, 10.0)
    return CaseResult(
        case=Case("bert", strategy, device, "small", memory_ratio=memory_ratio),
        dtype="float32",
        identity=HERE if identity is None else identity,
        original=original,
        optimized=original if strategy == "eager" else step(opt, 10.0 * (ratio or 1.0)),
        ratio=RatioInterval(ratio, ratio - half, ratio + half, 15) if measured and ratio is not None else None,
        weight_bytes=100,
        persistent_bytes=200,
        memory_limit_bytes=None if memory_ratio is None else int(memory_ratio * ori[1]),
        latency_limit_ms=None,
        device_memory_bytes=2**30,
        lower_bound_bytes=lower_bound,
        numbers=numbers,
        graph_digest="g1",
        search=SearchStats(states=9, feasible=feasible, stopped_by_seconds=stopped),
    )


def compare(now: CaseResult, before: CaseResult | None, permissions: str = "", **tolerances: float) -> Verdict:
    """The verdict on `now` against a baseline made from `before`."""
    baseline = None if before is None else updated(None, "bert", "label", before.case, before)
    allowed = frozenset(permissions.split(",")) - {""}
    stored = stored_case(baseline, "label", now.case)
    return judge(now, stored, tolerances=Tolerances(**tolerances), permissions=allowed)


def kinds(verdict: Verdict) -> list[str]:
    return [finding.kind for finding in verdict.findings]


def check(verdict: Verdict, label: str, *found: str, passed: bool) -> None:
    assert (verdict.label, tuple(kinds(verdict)), verdict.passed) == (label, found, passed)
    assert all("\n" not in line for line in (*(f.text for f in verdict.findings), *verdict.notes))


def test_the_same_again_passes_silently():
    verdict = compare(result(), result())
    check(verdict, "pass", passed=True)
    assert verdict.notes == ()
    assert not verdict.store


def test_no_baseline_fails_and_is_new():
    check(compare(result(), None), "FAIL new", "new", passed=False)
    check(compare(result(), None, "better,worse"), "FAIL new", "new", passed=False)
    verdict = compare(result(), None, "new")
    check(verdict, "accepted new", "new", passed=True)
    assert verdict.store


@pytest.mark.parametrize("bytes_", [(701, 751), (701, 749), (701, 750)])
def test_one_more_tensor_byte_is_worse(bytes_):
    verdict = compare(result(opt=bytes_), result())
    assert (verdict.passed, verdict.label) == (False, "FAIL worse")
    assert verdict.findings[0].text == "optimized tensor bytes: 701 (701 B), allowed 700 (700 B), +0.1%"


def test_one_less_is_better_and_passes():
    verdict = compare(result(opt=(699, 749)), result())
    check(verdict, "pass, better", "better", passed=True)
    assert verdict.findings[0].text == "optimized tensor bytes: 699, baseline 700, -0.1%"
    assert verdict.needed == ("better",)
    assert not verdict.store
    assert compare(result(opt=(699, 749)), result(), "better").store


def test_workspace_alone_is_compared_on_the_same_identity_only():
    check(compare(result(opt=(700, 751)), result()), "FAIL worse", "worse", passed=False)
    verdict = compare(result(opt=(700, 751), identity=ELSEWHERE), result())
    check(verdict, "pass", passed=True)
    assert "only tensor bytes are gated" in verdict.notes[0]
    simulated = result(device="sim:v100")
    check(compare(replace(simulated, identity=ELSEWHERE), simulated), "pass", passed=True)
    worse = result(device="sim:v100", opt=(700, 751), identity=ELSEWHERE)
    check(compare(worse, simulated), "FAIL worse", "worse", passed=False)


@pytest.mark.parametrize("strategy", ["eager", "magis", "checkpoint"])
def test_the_original_is_gated_under_every_strategy(strategy):
    before, now = result(strategy=strategy), result(strategy=strategy, ori=(1050, 1150))
    verdict = compare(now, before)
    check(verdict, "FAIL worse", "worse", passed=False)
    assert verdict.findings[0].text.startswith("original tensor bytes: 1,050 (1.03 KiB), allowed 1,000 (1000 B), +5.0%")


def test_a_peak_above_the_limit_is_broken():
    verdict = compare(result(opt=(700, 881)), result(opt=(700, 881)), "new,better,worse")
    check(verdict, "FAIL broken", "broken", passed=False)
    assert (
        verdict.findings[0].text
        == "optimized peak bytes above the memory limit: 881 (881 B), allowed 880 (880 B), +0.1%"
    )
    check(compare(result(opt=(700, 880)), result(opt=(700, 880))), "pass", passed=True)


def test_elsewhere_the_limit_is_a_note_and_the_tensors_are_gated():
    # the limit is a share of the peak measured there, scratch included; the plan was made for the limit stored here
    before = result(opt=(700, 880))
    verdict = compare(result(opt=(700, 950), identity=ELSEWHERE), before)
    check(verdict, "pass", passed=True)
    assert any("above the memory limit on this device" in note for note in verdict.notes)
    just = compare(result(opt=(700, 880), identity=ELSEWHERE), before)
    assert not any("above the memory limit" in note for note in just.notes)
    over = result(opt=(881, 950), identity=ELSEWHERE)
    assert compare(over, result(opt=(881, 881), memory_ratio=1.0)).passed
    assert compare(over, before).label == "FAIL worse"


@pytest.mark.parametrize("which", ["original", "optimized"])
@pytest.mark.parametrize(("tensors", "workspace"), [(4, 0), (-4, 0), (0, 4), (0, -4)])
def test_a_simulator_that_is_off_is_broken_on_cpu(which, tensors, workspace):
    now = result()
    step = getattr(now, which)
    memory = Memory(step.measured.tensor_bytes + tensors, step.measured.peak_bytes + tensors + workspace)
    verdict = compare(replace(now, **{which: replace(step, simulated=memory)}), now, "new,better,worse")
    check(verdict, "FAIL broken", "broken", passed=False)
    assert verdict.findings[0].text.startswith(f"{which} {'tensor' if tensors else 'peak'} bytes are not as simulated")


def test_the_eager_step_is_named_once():
    now = result(strategy="eager")
    off = replace(now.original, simulated=Memory(1004, 1104))
    verdict = compare(replace(now, original=off, optimized=off), now)
    check(verdict, "FAIL broken", "broken", passed=False)
    expected = "original tensor bytes are not as simulated: simulated 1,004, measured 1,000 (+4)"
    assert verdict.findings[0].text == expected


def test_under_checkpointing_only_the_optimized_peak_may_differ_from_what_is_simulated():
    # torch keeps generator states then, which are no part of the step's graph
    now = result(strategy="checkpoint")
    for which, label in (("optimized", "pass"), ("original", "FAIL broken")):
        step = getattr(now, which)
        off = replace(step, simulated=Memory(step.simulated.tensor_bytes, step.simulated.peak_bytes - 4))
        assert compare(replace(now, **{which: off}), now).label == label
    wrong_tensors = replace(now.optimized, simulated=Memory(704, 754))
    assert compare(replace(now, optimized=wrong_tensors), now).label == "FAIL broken"


@pytest.mark.parametrize(
    ("bytes_", "expected"), [(100_040, "+0.04%"), (100_050, "+0.1%"), (100_060, "+0.1%"), (101_000, "+1.0%")]
)
def test_small_shares_keep_two_digits(bytes_, expected):
    before = result(ori=(200_000, 200_000), opt=(100_000, 100_000))
    now = result(ori=(200_000, 200_000), opt=(bytes_, bytes_))
    assert compare(now, before).findings[0].text.endswith(f", {expected}")


def test_what_the_core_remarks_is_passed_on_in_one_line():
    now = replace(result(), note="not run:\n it is too large")
    assert compare(now, now).notes == ("not run: it is too large",)


def test_elsewhere_scratch_may_differ_from_what_is_simulated_and_is_said():
    now = result(identity=ELSEWHERE)
    step = replace(now.optimized, simulated=Memory(700, 740))
    verdict = compare(replace(now, optimized=step), result())
    check(verdict, "pass", passed=True)
    assert verdict.notes[1:] == ("optimized peak bytes are not as simulated on this device (-10)",)
    assert len(compare(now, result()).notes) == 1
    wrong_tensors = replace(now.optimized, simulated=Memory(704, 754))
    assert compare(replace(now, optimized=wrong_tensors), result()).label == "FAIL broken"


def test_another_identity_is_added_only_if_nothing_else_changed():
    assert compare(result(identity=ELSEWHERE), result(), "new").store
    assert compare(result(identity=ELSEWHERE), result(), "new").label == "accepted new"
    assert not compare(result(identity=ELSEWHERE), result(), "better,worse").store
    smaller = compare(result(identity=ELSEWHERE, opt=(600, 650)), result(), "new")
    check(smaller, "pass, better", "better", passed=True)
    assert not smaller.store


def test_what_is_allowed_includes_the_tolerance():
    verdict = compare(
        result(opt=(1200, 1300), memory_ratio=None), result(opt=(1000, 1100), memory_ratio=None), memory=0.1
    )
    assert verdict.findings[0].text == "optimized tensor bytes: 1,200 (1.17 KiB), allowed 1,100 (1.07 KiB), +9.1%"


def test_a_latency_limit_that_the_device_does_not_keep_is_said():
    def at(ratio: float) -> tuple[str, ...]:
        made = result(ratio=ratio, half=0.0, memory_ratio=None)
        made = replace(made, case=replace(made.case, latency_ratio=1.1))
        return compare(made, made).notes

    assert at(1.1) == ()
    assert at(1.2) == ("latency ratio 1.200 is above the limit of 1.1 that was asked for",)


def test_on_cuda_the_simulator_may_be_off_by_a_hundredth():
    now = result(device="cuda", ori=(100_000, 100_000), opt=(70_000, 70_000))
    for off, broken in ((1000, False), (1001, True), (-1000, False), (-1001, True)):
        step = replace(now.original, simulated=Memory(100_000 + off, 100_000 + off))
        assert compare(replace(now, original=step), now).passed != broken


def test_numbers_that_differ_are_broken():
    verdict = compare(result(numbers="differs: loss 1\nis not 2"), result(), "worse")
    check(verdict, "FAIL broken", "broken", passed=False)
    assert verdict.findings[0].text == "numbers: differs: loss 1 is not 2"
    assert verdict.needed == ()
    for numbers in ("within tolerance", "not run", "bit-identical"):
        check(compare(result(numbers=numbers), result()), "pass", passed=True)


@pytest.mark.parametrize(
    ("ratio", "half", "label"),
    [
        (1.071, 0.009, "FAIL worse"),  # from 1.062; 1.02 * 1.04 = 1.0608 is allowed
        (1.071, 0.011, "pass"),
        (1.5, 0.44, "pass"),
        (0.96, 0.001, "pass, better"),
        (0.96, 0.02, "pass"),
        (1.02, 0.5, "pass"),
    ],
)
def test_latency_is_judged_by_its_whole_interval(ratio, half, label):
    assert compare(result(ratio=ratio, half=half), result()).label == label


def test_latency_elsewhere_or_untimed_is_not_gated():
    assert compare(result(ratio=3.0, identity=ELSEWHERE), result()).passed
    verdict = compare(result(ratio=None), result())
    check(verdict, "pass", passed=True)
    assert verdict.notes == ("latency is not gated: this run has no latency ratio",)
    assert compare(result(), result(ratio=None)).notes == ("latency is not gated: the baseline has no latency ratio",)


def test_an_infeasible_case_passes_only_if_the_baseline_says_so():
    infeasible = result(feasible=False, opt=(900, 950), lower_bound=890)
    check(compare(infeasible, None), "FAIL new", "new", passed=False)
    verdict = compare(infeasible, infeasible)
    check(verdict, "infeasible, proven", passed=True)
    met = replace(infeasible, search=replace(infeasible.search, feasible=True), memory_limit_bytes=950)
    verdict = compare(infeasible, met)
    check(verdict, "FAIL worse", "worse", passed=False)
    expected = "the limit is no longer met: the lower bound 890 (890 B) exceeds the limit 880 (880 B)"
    assert verdict.findings[0].text == expected
    verdict = compare(met, infeasible)
    check(verdict, "pass, better", "better", passed=True)
    assert verdict.findings[0].text == "the limit is met now, the baseline says infeasible"


def test_a_limit_that_was_only_not_reached_does_not_look_like_one_that_cannot_be():
    def missed(**more: object) -> CaseResult:
        return replace(result(feasible=False, opt=(900, 950)), **more)

    proven = missed(lower_bound_bytes=881)
    assert compare(proven, proven).label == "infeasible, proven"
    assert compare(proven, proven).notes == (
        "infeasible, proven: the lower bound 881 (881 B) exceeds the limit 880 (880 B)",
    )
    for bound in (880, 500):  # a plan of just the lower bound would meet the limit
        unproven = missed(lower_bound_bytes=bound)
        verdict = compare(unproven, unproven)
        check(verdict, "no plan found", passed=True)
        best = "best peak bytes 950 (950 B), allowed 880 (880 B), +8.0%"
        assert verdict.notes == (f"no plan found: {best}; the lower bound {bound} does not rule it out",)
    unlimited = missed(memory_limit_bytes=None, lower_bound_bytes=881)
    verdict = compare(unlimited, unlimited)
    check(verdict, "no plan found", passed=True)
    assert verdict.notes == ("no plan found: the search found none within the latency limit",)


def test_a_wider_layer_is_one_line():
    verdict = compare(result(ori=(1100, 1200), opt=(777, 827)), result())
    check(verdict, "FAIL worse", "worse", passed=False)
    expected = "original tensor bytes: 1,100 (1.07 KiB), allowed 1,000 (1000 B), +10.0%; optimized +11.0%"
    assert verdict.findings[0].text == expected
    lost = result(ori=(1100, 1200), opt=(970, 1020), feasible=False)
    text = compare(lost, result()).findings[0].text
    assert text.endswith("+10.0%; optimized +38.6%; the limit is no longer met")
    with_tolerance = compare(result(ori=(1100, 1200), opt=(777, 827)), result(), memory=0.05).findings
    assert [finding.text for finding in with_tolerance] == [
        "original tensor bytes: 1,100 (1.07 KiB), allowed 1,050 (1.03 KiB), +4.8%; optimized +5.7%"
    ]


def test_a_narrower_layer_is_one_line_too():
    verdict = compare(result(ori=(900, 1000), opt=(630, 680)), result())
    check(verdict, "pass, better", "better", passed=True)
    expected = "original tensor bytes: 900, baseline 1,000, -10.0%; optimized -10.0%"
    assert verdict.findings[0].text == expected


def test_worse_and_better_are_two_lines_and_the_worse_one_decides():
    verdict = compare(result(ori=(1100, 1200), opt=(690, 740)), result())
    check(verdict, "FAIL worse", "worse", "better", passed=False)
    assert verdict.needed == ("better", "worse")


def test_fewer_tensor_bytes_do_not_hide_a_higher_peak():
    verdict = compare(result(opt=(699, 751)), result())
    check(verdict, "FAIL worse", "better", "worse", passed=False)
    assert [finding.text for finding in verdict.findings] == [
        "optimized tensor bytes: 699, baseline 700, -0.1%",
        "optimized peak bytes: 751 (751 B), allowed 750 (750 B), +0.1%",
    ]


def test_what_is_broken_is_all_that_is_said():
    verdict = compare(result(opt=(840, 890)), result())
    check(verdict, "FAIL broken", "broken", passed=False)


# --- latency: boundaries ------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("end", "allowed", "why"),
    [
        (None, 1.04, "baseline 1 + 0.04"),
        (0.9, 1.04, "baseline 1 + 0.04"),
        (1.02, 1.04, "baseline 1 + 0.04"),
        (1.04, 1.04, "baseline 1 + 0.04"),
        (1.0401, 1.0401, "where the interval of the baseline 1 ends"),
        (1.05, 1.05, "where the interval of the baseline 1 ends"),
        (1.06, 1.06, "where the interval of the baseline 1 ends"),
        (1.0601, 1.06, "baseline 1 + 1.5 * 0.04: its interval ends at 1.0601, which counts no further"),
        (3.0, 1.06, "baseline 1 + 1.5 * 0.04: its interval ends at 3, which counts no further"),
    ],
)
def test_the_interval_of_the_baseline_counts_up_to_a_cap(end, allowed, why):
    edge = allowed + ROUNDING
    assert latency(edge, 1.2, end=end).passed
    verdict = latency(math.nextafter(edge, 2), 1.2, end=end)
    check(verdict, "FAIL worse", "worse", passed=False)
    assert f", allowed {allowed:.3f} ({why}), +" in verdict.findings[0].text


@pytest.mark.parametrize(("end", "noted"), [(None, False), (1.02, False), (1.06, True), (3.0, True)])
def test_passing_only_by_the_interval_of_the_baseline_is_said(end, noted):
    edge = 1.04 + ROUNDING
    assert latency(edge, 1.2, end=end).notes == ()
    verdict = latency(math.nextafter(edge, 2), 1.2, end=end)
    assert verdict.passed == noted
    expected = (
        "latency ratio (opt/ori): 1.120 [1.040, 1.200], above 1.040 (baseline 1 + 0.04),"
        f" but the interval of that baseline ends at {end:g}"
        if noted
        else ""
    )
    assert verdict.notes == ((expected,) if noted else ())


def test_a_row_that_was_stopped_says_nothing_about_its_latency():
    before, stopped = result(ratio=1.0, half=0.06), result(ratio=1.06, half=0.01, stopped=True)
    assert any("the interval of that baseline" in note for note in compare(result(ratio=1.06), before).notes)
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
def test_a_tenth_slower_is_red_however_badly_the_baseline_was_measured(half):
    # the step itself measured as the gate measures: to within 0.02
    for ratio in (0.9, 1.0, 1.1):
        before = result(ratio=ratio, half=half * ratio)
        assert not compare(result(ratio=1.1 * ratio, half=0.02 * ratio), before).passed
        assert compare(result(ratio=ratio, half=0.02 * ratio), before).passed


def test_a_row_that_was_stopped_is_not_gated():
    worse = result(opt=(720, 790), ratio=2.0, stopped=True)
    check(compare(worse, result(), "worse"), "not gated", passed=True)
    check(compare(worse, None, "new"), "not gated", passed=True)
    assert not compare(worse, None, "new").store
    assert compare(result(stopped=True, ori=(1001, 1101)), result(), "worse").label == "FAIL worse"
    assert compare(result(stopped=True, opt=(700, 881)), result()).label == "FAIL broken"


# --- properties ---------------------------------------------------------------------------------------------

COUNTS = st.integers(min_value=1, max_value=2**60)


@st.composite
def memories(draw: st.DrawFn) -> tuple[int, int]:
    tensors = draw(COUNTS)
    return tensors, tensors + draw(st.integers(min_value=0, max_value=2**50))


@st.composite
def results(
    draw: st.DrawFn,
    strategies: tuple[str, ...] = ("eager", "magis", "checkpoint"),
    met: tuple[bool, ...] = (True, False),
) -> CaseResult:
    """Results that are not broken: the limit is above what was reached unless infeasible."""
    ori, opt = draw(memories()), draw(memories())
    device = draw(st.sampled_from(["cpu", "cuda", "sim:v100"]))
    ratio = draw(st.floats(min_value=0.2, max_value=5, allow_nan=False))
    half = draw(st.floats(min_value=0, max_value=0.1, allow_nan=False))
    made = result(
        ori=ori,
        opt=opt,
        device=device,
        ratio=ratio,
        half=half,
        strategy=draw(st.sampled_from(strategies)),
        feasible=draw(st.sampled_from(met)),
        identity=draw(st.sampled_from([HERE, ELSEWHERE])),
    )
    if made.memory_limit_bytes is not None and made.search.feasible:
        made = replace(made, memory_limit_bytes=opt[1] + draw(st.integers(min_value=0, max_value=1000)))
    return made


PERMITTED = st.frozensets(st.sampled_from(PERMISSIONS))
SHARES = st.floats(min_value=0, max_value=1, allow_nan=False)


@given(results(), PERMITTED, SHARES, SHARES)
def test_whatever_was_stored_passes_when_it_comes_again(made, permitted, memory, latency):
    stored = stored_case(updated(None, "bert", "label", made.case, made), "label", made.case)
    verdict = judge(made, stored, tolerances=Tolerances(memory, latency), permissions=permitted)
    assert verdict.passed
    assert verdict.findings == ()
    assert not verdict.store


@given(results(), results(), PERMITTED)
def test_red_exactly_if_something_is_neither_better_nor_permitted(now, before, permitted):
    assume(now.case.device == before.case.device and now.case.strategy == before.case.strategy)
    stored = stored_case(updated(None, "bert", "label", before.case, before), "label", before.case)
    verdict = judge(now, stored, permissions=permitted)
    found = set(kinds(verdict))
    assert verdict.passed == (found <= permitted or found <= {"better"})
    assert verdict.store <= verdict.passed
    assert verdict.label.startswith("FAIL") != verdict.passed
    if found:
        assert set(verdict.needed) == found
        assert verdict.store == (found <= permitted)


@given(results(), results(), PERMITTED)
def test_what_is_stored_holds_for_the_next_run(now, before, permitted):
    baseline = updated(None, "bert", "label", before.case, before)
    baseline = replace(baseline, device=now.case.device)
    assume(now.case.device == before.case.device)
    verdict = judge(now, stored_case(baseline, "label", now.case), permissions=permitted)
    if verdict.store:
        again = stored_case(updated(baseline, "bert", "label", now.case, now), "label", now.case)
        assert judge(now, again).findings == ()
        assert again is not None
        assert identity_key(now) in again.measured


@given(results(("magis",), (True,)), st.integers(min_value=1, max_value=2**40), SHARES)
def test_more_memory_is_never_judged_better(made, more, tolerance):
    stored = stored_case(updated(None, "bert", "label", made.case, made), "label", made.case)
    memory = Memory(made.memory.tensor_bytes + more, made.memory.peak_bytes + more)
    step = replace(made.optimized, simulated=memory, measured=memory if made.optimized.measured else None)
    grown = replace(made, optimized=step, memory_limit_bytes=memory.peak_bytes)
    verdict = judge(grown, stored, tolerances=Tolerances(tolerance))
    assert "better" not in kinds(verdict)
    slack_tensors, slack_peak = (int(x * 1) for x in (made.memory.tensor_bytes, made.memory.peak_bytes))
    if tolerance == 0:
        assert "worse" in kinds(verdict)
    if more <= min(slack_tensors, slack_peak) * tolerance * 0.999:
        assert verdict.passed


@given(results(), PERMITTED)
def test_nothing_stores_what_is_broken(made, permitted):
    broken = replace(made, numbers="differs: loss")
    for before in (None, made):
        baseline: ModelBaseline | None = None
        if before is not None:
            baseline = updated(None, "bert", "label", before.case, before)
        verdict = judge(broken, stored_case(baseline, "label", made.case), permissions=permitted | ALL)
        assert not verdict.passed
        assert not verdict.store
