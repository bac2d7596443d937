"""Properties of verdicts over random results."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, example, given
from hypothesis import strategies as st

from magis.results import CaseResult, Memory
from pytest_magis.baselines import ModelBaseline, identity_key, stored_case, updated
from pytest_magis.findings import PERMISSIONS, Tolerances
from pytest_magis.verdict import judge
from tests.plugin.verdicts import ALL, ELSEWHERE, HERE, kinds, result

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


@given(st.integers(1, 10**9), st.integers(1, 10**10), st.booleans())
@example(10_000, 3, True)  # 0.0003 is less than 3 of 10,000
def test_the_tolerance_that_is_named_lets_a_simulator_pass_and_hardly_more(seen, off, above):
    """Above what is measured or below; a ten-thousandth and a half less would not do."""
    assume(off < 10 * seen and (above or off <= seen))
    now = result(ori=(seen, seen), opt=(1, 1), memory_ratio=None)
    simulated = seen + off if above else seen - off
    now = replace(now, original=replace(now.original, simulated=Memory(simulated, simulated)))
    (finding,) = judge(now, None).findings
    named = float(finding.why.partition("--magis-memory-tolerance=")[2].partition(" ")[0])
    for tolerance, broken in ((named, False), (named - 0.00015, True)):
        verdict = judge(now, None, tolerances=Tolerances(max(tolerance, 0.0)))
        assert ("broken" in kinds(verdict)) == broken


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
