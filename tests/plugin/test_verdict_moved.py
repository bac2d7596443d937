"""A planned row is a record of a plan: what moved although the step did not is said, and green."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from magis.results import CaseResult, RatioInterval
from pytest_magis.baseline_files import parse, render
from pytest_magis.baselines import identity_key, stored_case, torch_release, updated
from pytest_magis.findings import Tolerances
from pytest_magis.verdict import judge
from tests.plugin.verdicts import ELSEWHERE, check, compare, result


def planned(*, planner: str = "p1", step: str = "s1", graph: str = "g1", **figures: object) -> CaseResult:
    return replace(result(**figures), planner=planner, step_digest=step, graph_digest=graph)  # type: ignore[arg-type]


FIGURES = {
    "fewer bytes": {"opt": (600, 650)},
    "more bytes": {"opt": (701, 751)},
    "more scratch": {"opt": (700, 752)},
    "faster": {"ratio": 0.9},
    "slower": {"ratio": 1.2},
}


@pytest.mark.parametrize("device", ["cpu", "sim:h100"])
@pytest.mark.parametrize("what", FIGURES)
@pytest.mark.parametrize("form", [("g1", "s1"), ("g2", "s1"), ("g1", "s2")])
def test_what_another_planner_makes_of_the_same_step_is_green_within_the_limit(what, form, device):
    """An upgrade of magis may write the captured graph in another form, too, or the digest of its operators."""
    before = planned(device=device)
    now = planned(planner="p2", graph=form[0], step=form[1], device=device, **FIGURES[what])
    verdict = compare(now, before)
    check(verdict, "pass, moved", "moved", passed=True)
    assert ": moved by the planner" in verdict.findings[0].text
    assert compare(now, before, "moved").store
    for others in ("new", "better", "worse", "new,better,worse"):
        assert not compare(now, before, others).store
    strict = judge(now, stored(before), tolerances=Tolerances(keeps_wins=True, needs_limits=True))
    assert strict.passed
    check(compare(now, now), "pass", passed=True)


def stored(before):
    return stored_case(updated(None, "bert", "label", before.case, before), "label", before.case)


@pytest.mark.parametrize(
    "change",
    [
        {"graph": "g2", "step": "s2"},  # other operators
        {"ori": (1001, 1101)},  # other bytes of eager's
        {"ori": (999, 1099)},
        {"opt": (700, 881)},  # above the limit
    ],
)
@pytest.mark.parametrize("planner", ["p1", "p2"])
def test_another_step_that_got_worse_or_a_missed_limit_is_red_whoever_planned(change, planner):
    before = planned()
    now = planned(planner=planner, **({"opt": (701, 751)} | change))
    verdict = compare(now, before, "new,moved")
    assert not verdict.passed
    assert "moved" not in {finding.kind for finding in verdict.findings}


def test_the_same_planner_makes_no_other_bytes_of_the_same_step():
    check(compare(planned(opt=(701, 751)), planned()), "FAIL worse", "worse", passed=False)


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.2, 3.0])
def test_noise_alone_turns_no_latency_red(ratio):
    """Step, planner and torch are those of the baseline, so the code that runs is: the machine made the difference."""
    before, now = planned(), planned(ratio=ratio)
    verdict = compare(now, before)
    check(verdict, "pass, moved", "moved", passed=True)
    assert verdict.findings[0].text.endswith(": moved by the machine")
    assert compare(now, before, "moved").store
    assert compare(replace(now, graph_digest="g2", step_digest="s2"), before).passed == (ratio < 1)
    in_doubt = replace(now, ratio=RatioInterval(ratio, ratio, ratio, 9, "the machine is too busy"))
    check(compare(in_doubt, before), "pass", passed=True)


def test_a_simulated_latency_has_no_noise():
    before = planned(device="sim:h100")
    check(compare(planned(device="sim:h100", ratio=1.2), before), "FAIL worse", "worse", passed=False)


@pytest.mark.parametrize("figures", FIGURES.values())
def test_a_file_that_is_older_was_planned_by_an_older_planner(figures):
    before = updated(None, "bert", "label", planned().case, result())
    assert '"planner"' not in render(before)
    old = stored_case(parse(render(before), Path("bert.json")), "label", planned().case)
    check(judge(planned(**figures), old), "pass, moved", "moved", passed=True)
    other = judge(planned(graph="g2", **({"opt": (701, 751)} | figures)), old)
    assert "moved" not in {finding.kind for finding in other.findings}
    # what nothing planned is compared as ever
    assert compare(result(opt=(701, 751)), result()).label == "FAIL worse"


def test_a_limit_that_is_no_longer_met_was_moved_by_nobody():
    now = planned(planner="p2", feasible=False, opt=(900, 990))
    check(compare(now, planned()), "FAIL worse", "moved", "worse", passed=False)


def test_a_machine_may_have_a_plan_of_its_own_beside_the_others():
    """Where the plan of the baseline misses its limit, one for the workspaces of the machine is made: both are kept."""
    there = replace(planned(identity=ELSEWHERE, opt=(690, 760)), portable=False, planning_workspaces={"conv": 9})
    first = replace(planned(), planning_workspaces={"conv": 1})
    one = updated(None, "bert", "label", first.case, first)
    verdict = judge(there, stored_case(one, "label", first.case), permissions=frozenset(("new",)))
    check(verdict, "accepted new", passed=True)
    assert any(note.startswith("planned for the workspaces of this machine") for note in verdict.notes)
    both = parse(render(updated(one, "bert", "label", first.case, there)), Path("bert.json"))
    entry = stored_case(both, "label", first.case)
    assert entry is not None
    assert set(entry.measured) == {identity_key(first), identity_key(there)}
    (configuration,) = both.configurations.values()
    assert [*configuration.workspaces.values()] == [{"conv": 1}]
    check(judge(first, entry), "pass", passed=True)
    check(judge(there, entry), "pass", passed=True)
    grown = replace(there, optimized=planned(opt=(691, 761)).optimized)
    check(judge(grown, entry), "FAIL worse", "worse", passed=False)
    # another step is another plan, of which the others measured nothing
    other = replace(there, graph_digest="g2", portable=True)
    changed = stored_case(updated(both, "bert", "label", first.case, other), "label", first.case)
    assert changed is not None
    assert [*changed.measured] == [identity_key(there)]


@pytest.mark.parametrize("device", ["cpu", "sim:h100"])
@pytest.mark.parametrize(
    ("form", "words"),
    [
        (("g1", "s2"), "the step has the same operators, and all of it can be judged"),
        (("g2", "s1"), "the step has the same operators, and all of it can be judged"),
        (("g2", "s2"), "it runs other operators; --magis-against=torch==2.1.0 says what torch moved"),
    ],
)
def test_a_baseline_of_another_torch_says_whether_its_row_can_be_judged(form, words, device):
    before = planned(device=device)
    entry = stored(before)
    assert entry.torch == torch_release()
    now = planned(graph=form[0], step=form[1], device=device)
    assert not any("torch" in note for note in judge(now, entry).notes)
    assert not any("torch" in note for note in judge(now, replace(entry, torch=None)).notes)  # an older file
    verdict = judge(now, replace(entry, torch="2.1.0"))
    assert f"the baseline is of torch 2.1.0, this is {torch_release()}: {words}" in verdict.notes
    assert verdict.passed
