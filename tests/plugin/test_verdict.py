"""The verdict, example by example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magis.module_bytes import ModuleBytes, Peak, StepGrowth
from magis.results import CaseResult, Memory, StepFigures
from pytest_magis.baselines import stored_case, updated
from pytest_magis.findings import Tolerances
from pytest_magis.verdict import Verdict, judge_against
from tests.plugin.verdicts import ELSEWHERE, HERE, check, compare, result


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


def test_a_limit_that_is_missed_is_red_on_every_machine():
    """It is a share of the peak there, scratch included: a plan for that scratch is made where it is needed."""
    before = result(opt=(700, 880))
    for identity in (HERE, ELSEWHERE):
        over = compare(result(opt=(700, 881), identity=identity), before, "new,moved,better,worse")
        check(over, "FAIL broken", "broken", passed=False)
        assert compare(result(opt=(700, 880), identity=identity), before).passed
    late = replace(result(ratio=1.2, memory_ratio=None), memory_limit_bytes=None)
    late = replace(late, case=replace(late.case, latency_ratio=1.1))
    check(compare(late, late), "limit missed", passed=True)  # simulated within it: told, and no pass


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


def test_a_simulator_that_is_off_says_which_tolerance_lets_it_pass():
    now = result()
    now = replace(now, original=replace(now.original, simulated=Memory(1000, 1101)))
    broken = compare(now, result())
    check(broken, "FAIL broken", "broken", passed=False)
    assert broken.findings[0].why.endswith("--magis-memory-tolerance=0.001 lets it pass")
    check(compare(now, result(), memory=0.001), "pass", passed=True)
    check(compare(now, result(), memory=0.0005), "FAIL broken", "broken", passed=False)
    now = replace(now, original=replace(now.original, simulated=Memory(0, 0)))
    assert compare(now, result()).findings[0].why.endswith("=1.0001 lets it pass")
    off_nothing = replace(now.original, simulated=Memory(0, 4), measured=Memory(0, 0))
    check(compare(replace(now, original=off_nothing), result()), "FAIL broken", "broken", passed=False)


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
    said = "latency is not gated: the baseline has no latency ratio; --magis-update=new adds one"
    assert compare(result(), result(ratio=None)).notes == (said,)


def test_an_infeasible_case_passes_only_if_the_baseline_says_so():
    infeasible = result(feasible=False, opt=(900, 950), lower_bound=890)
    check(compare(infeasible, None), "FAIL new", "new", passed=False)
    verdict = compare(infeasible, infeasible)
    check(verdict, "infeasible, proven", passed=True)
    met = replace(infeasible, search=replace(infeasible.search, feasible=True), memory_limit_bytes=950)
    verdict = compare(infeasible, met)
    check(verdict, "FAIL worse", "worse", passed=False)
    bound = "the lower bound 890 (890 B) exceeds the limit 880 (880 B)"
    expected = f"the limit is no longer met: {bound}; best peak found 950 (950 B)"
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
        "infeasible, proven: the lower bound 881 (881 B) exceeds the limit 880 (880 B); best peak found 950 (950 B)",
    )
    told = missed(lower_bound_bytes=881, bound="881 B that\nstay")
    assert compare(told, told).notes == (f"{compare(proven, proven).notes[0]}; the bound: 881 B that stay",)
    for bound in (880, 500):  # a plan of just the lower bound would meet the limit
        unproven = missed(lower_bound_bytes=bound)
        verdict = compare(unproven, unproven)
        check(verdict, "no plan found", passed=True)
        best = "best peak bytes 950 (950 B), allowed 880 (880 B), +8.0%"
        assert verdict.notes == (f"no plan found: {best}; the lower bound {bound} does not rule it out",)
        told = compare(replace(unproven, bound="what stays"), None)
        assert told.notes == (f"{verdict.notes[0]}; the bound: what stays",)
    unlimited = missed(memory_limit_bytes=None, lower_bound_bytes=881, bound="what stays")
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


def test_a_row_that_was_stopped_is_not_gated():
    worse = result(opt=(720, 790), ratio=2.0, stopped=True)
    check(compare(worse, result(), "worse"), "not gated", passed=True)
    check(compare(worse, None, "new"), "not gated", passed=True)
    assert not compare(worse, None, "new").store
    assert compare(result(stopped=True, ori=(1001, 1101)), result(), "worse").label == "FAIL worse"
    assert compare(result(stopped=True, opt=(700, 881)), result()).label == "FAIL broken"


# --- memory that grows from step to step --------------------------------------------------------------------


def growing(nbytes: int, **more: object) -> CaseResult:
    return replace(result(), growth=StepGrowth(nbytes, 5, ()), **more)


def test_memory_that_grows_is_worse_until_that_is_stored():
    said = "memory grows from step to step: 64 B more are alive after step 5 than after step 2"
    verdict = compare(growing(64), None, "new")
    check(verdict, "FAIL new+worse", "worse", "new", passed=False)
    assert verdict.findings[0].text == said
    assert compare(growing(64), None, "new,worse").store
    verdict = compare(growing(64), result())
    check(verdict, "FAIL worse", "worse", passed=False)
    assert verdict.findings[0].text == said
    check(compare(growing(64), growing(64)), "pass", passed=True)
    check(compare(growing(65), growing(64)), "FAIL worse", "worse", passed=False)
    check(compare(growing(63), growing(64)), "pass", passed=True)
    check(compare(growing(0), None, "new"), "accepted new", "new", passed=True)


# --- what grew --------------------------------------------------------------------------------------------


def explained(**more: object) -> CaseResult:
    """Whose original step holds `first` at its peak, and whose optimized step `second`."""
    made = result(**more)

    def holding(step: StepFigures, module: str) -> StepFigures:
        held = (ModuleBytes("activation", module, step.simulated.tensor_bytes, 1),)
        return replace(step, at_peak=Peak("aten.mm.default", module, "forward", "", held), reserved_bytes=4096)

    original, optimized = holding(made.original, "first"), holding(made.optimized, "second")
    return replace(made, original=original, optimized=optimized)


@pytest.mark.parametrize(
    ("changes", "module"),
    [({"opt": (701, 751)}, "second"), ({"ori": (1050, 1150)}, "first"), ({"ori": (1000, 1101)}, "first")],
)
def test_what_grew_is_looked_for_in_the_step_that_grew(changes, module):
    (finding,) = compare(explained(**changes), explained()).findings
    assert finding.why.startswith(f"at the peak most is held by {module} ")


def test_reserved_bytes_grow_without_a_module():
    now = explained()
    more = replace(now, optimized=replace(now.optimized, reserved_bytes=6144))
    verdict = compare(more, now)
    check(verdict, "FAIL worse", "worse", passed=False)
    assert verdict.findings[0].text == "optimized reserved bytes: 6,144 (6.00 KiB), allowed 4,096 (4.00 KiB), +50.0%"
    assert verdict.findings[0].why.startswith("the peak did not grow")
    check(compare(now, more), "pass, better", "better", passed=True)
    unknown = compare(now, result())
    check(unknown, "pass", passed=True)
    assert unknown.notes == ("reserved bytes are not gated: the baseline has none; --magis-update=new adds them",)


# --- against another revision -------------------------------------------------------------------------------


def against(now: CaseResult, before: CaseResult | None, **tolerances: float) -> Verdict:
    baseline = None if before is None else updated(None, "bert", "label", before.case, before)
    found = stored_case(baseline, "label", now.case)
    return judge_against("main", now, found, tolerances=Tolerances(**tolerances))


def test_a_case_that_another_revision_has_not_is_new_and_passes():
    verdict = against(result(), None)
    check(verdict, "new", passed=True)
    assert verdict.notes == ("nothing to compare with: main has no such case",)
    assert (verdict.store, verdict.against, verdict.needed) == (False, "main", ())
    verdict = against(growing(64), None)
    check(verdict, "FAIL new+worse", "worse", passed=False)
    verdict = against(result(numbers="differs: loss"), None)
    check(verdict, "FAIL broken", "broken", passed=False)
    assert verdict.notes == ("nothing to compare with: main has no such case",)


def test_a_case_of_another_revision_is_judged_as_a_stored_one_and_nothing_is_stored():
    for now in (result(), result(opt=(701, 751)), result(opt=(699, 749)), result(opt=(770, 820), ratio=1.2)):
        for memory in (0.0, 0.1):
            assert against(now, result(), memory=memory) == replace(
                compare(now, result(), memory=memory), against="main"
            )
    worse = against(result(opt=(701, 751)), result())
    check(worse, "FAIL worse", "worse", passed=False)
    assert worse.needed == ()
