"""Plans under the smallest and absurd budgets and caps: verified, never a crash; and what an interrupt leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from magis.cases.run_case import run_case
from magis.graph import HOST_COPIES, verify
from magis.planner import planning, plans
from magis.planner.bench import Bench
from magis.planner.fission_plan import plan_with_fission
from magis.planner.plan_proof import prove
from magis.planner.planning import better, plan, plan_whole
from magis.planner.plans import ENOUGH, Plan, PlanScratch, SearchesFromNothing
from magis.planner.subject import Subject
from magis.progress import Progress
from magis.results import Case
from magis.search import budgeted_evaluator
from magis.search.budgeted_evaluator import Deadline, Objective, PlanRequest, never
from magis.search.driver import FROM_NOTHING
from magis.simulate.simulator import replay
from magis.simulate.timeline import elapsed_ns

BLOCKS = "tests.api.nets:few_blocks"
PROJECTED = "tests.api.nets:projected"
"""Cut into parts in many places."""


def subject_of(model: str, device: str) -> Subject:
    return Bench().subject(Case(model, "magis", device, "small"))


shared = functools.cache(subject_of)
"""For tests that leave a subject as it is."""


def planned(
    subject: Subject, ratio: float, budget: int | None, seconds: float | None, tell: Progress | None = None
) -> Plan:
    limit = int(ratio * subject.original.peak_bytes)
    return plan(
        subject,
        memory_limit=limit,
        latency_limit_ns=None,
        budget=budget,
        seconds=seconds,
        seed=0,
        stored=None,
        tell=tell,
    )


def assert_sound(subject: Subject, found: Plan) -> None:
    """Realized, verified, of the bytes that it says; eager's order at worst."""
    verify(found.graph)
    costs = subject.costs(subject.workspaces(found.graph))
    profile = replay(found.graph, costs.workspace, rounding=costs.rounding)
    assert profile.peak_bytes == found.peak <= subject.original.peak_bytes


@pytest.mark.parametrize("model", ["seed-bert", "seed-resnet50"])
def test_a_simulated_device_has_a_plan_at_once(model: str) -> None:
    found = planned(shared(model, "sim:rtx3090"), 0.6, None, 1e-9)
    assert found.feasible
    assert found.stopped_by_seconds
    assert_sound(shared(model, "sim:rtx3090"), found)


@pytest.mark.parametrize(("model", "device"), [("mlp", "sim:rtx3090"), (BLOCKS, "cpu")])
@pytest.mark.parametrize(("budget", "seconds"), [(1, None), (1, 0.001), (None, 0.001), (10**12, 0.001), (10**12, 1.0)])
@pytest.mark.parametrize("ratio", [0.6, 1e-9])
def test_any_budget_and_any_cap_give_a_sound_plan(
    model: str, device: str, ratio: float, budget: int | None, seconds: float | None
) -> None:
    subject = shared(model, device)
    found = planned(subject, ratio, budget, seconds)
    assert_sound(subject, found)
    assert found.feasible == (found.peak <= int(ratio * subject.original.peak_bytes))
    assert found.stopped_by_seconds or seconds != 0.001
    if budget == 1 and seconds is None:
        assert not found.stopped_by_seconds


@pytest.mark.parametrize("budget", [1, 10**12])
def test_a_case_of_any_budget_is_run_with_eagers_numbers(budget: int) -> None:
    case = Case(BLOCKS, "magis", "cpu", "small", memory_ratio=0.001, budget=budget, seconds=0.5, timing_rounds=6)
    result = run_case(case)
    assert result.numbers in ("bit-identical", "within tolerance")
    assert not result.search.feasible
    assert "that stay" in result.bound


@dataclass
class Clock:
    """Stands for ``time``: a second passes whenever somebody looks; at some look, it may raise."""

    ends_at: int = -1
    looks: int = field(default=0)

    def perf_counter(self) -> float:
        self.looks += 1
        if self.looks == self.ends_at:
            raise KeyboardInterrupt
        return float(self.looks)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    def start(**given: int) -> Clock:
        clock = Clock(**given)
        monkeypatch.setattr(budgeted_evaluator, "time", clock)
        return clock

    return start


def test_a_plan_that_is_ended_at_any_moment_is_sound(clocked: Callable[..., Clock]) -> None:
    subject = subject_of(BLOCKS, "sim:rtx3090")
    for looks in (3, 20, 200):
        clocked()
        found = planned(subject, 0.3, None, float(looks))
        assert_sound(subject, found)
        assert found.stopped_by_seconds


def test_a_cap_that_is_not_reached_changes_nothing_on_a_cpu(clocked: Callable[..., Clock]) -> None:
    """The search without fission may have all of it: nothing comes behind a limit that it keeps."""
    free = planned(subject_of(BLOCKS, "cpu"), 0.8, 500, None)
    clocked()
    capped = planned(subject_of(BLOCKS, "cpu"), 0.8, 500, 1e4)
    assert not capped.stopped_by_seconds
    assert (capped.peak, capped.latency_ns, capped.states) == (free.peak, free.latency_ns, free.states)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> int:
    """The budget of a search that goes through every stage with little work."""
    for module in (planning, plans):
        monkeypatch.setattr(module, "FROM_NOTHING", 300)
    monkeypatch.setattr(planning, "MOST_OPERATORS", 0)
    return 600


@pytest.mark.parametrize(("model", "ratio"), [(BLOCKS, 0.4), (PROJECTED, 0.3)])
def test_a_plan_that_no_cap_stopped_is_the_plan_without_one(
    clocked: Callable[..., Clock], little: int, model: str, ratio: float
) -> None:
    """Wherever the cap ends: before the loops, within them, before the front or behind it."""

    def capped(seconds: float) -> tuple[Plan, int]:
        clock = clocked()
        return planned(subject_of(model, "sim:rtx3090"), ratio, little, seconds), clock.looks

    free, looks = capped(1e12)
    assert not free.stopped_by_seconds
    without = planned(subject_of(model, "sim:rtx3090"), ratio, little, None)
    assert (free.peak, free.latency_ns) == (without.peak, without.latency_ns)
    stopped = []
    for share in (0.3, 0.7, 2.3):
        found, _ = capped(share * looks)
        stopped.append(found.stopped_by_seconds)
        if not found.stopped_by_seconds:
            assert (found.peak, found.latency_ns, found.states) == (free.peak, free.latency_ns, free.states)
    assert stopped[0]
    assert not stopped[-1]


def test_loops_come_before_the_front(little: int) -> None:
    told: list[str] = []
    subject = subject_of(BLOCKS, "sim:rtx3090")
    limit = int(0.4 * subject.original.peak_bytes)
    of = partial(plan, subject, memory_limit=limit, latency_limit_ns=None, seconds=None, seed=0, stored=None)
    of(budget=little, tell=told.append)
    assert list(dict.fromkeys(line.partition(",")[0].partition(":")[0] for line in told)) == [
        "searching", "searching with parts of the step as loops", "searching among plans for all limits",
        "searching among plans that wait for host copies",
    ]  # fmt: skip


def test_a_limit_that_no_plan_keeps_without_waits_is_kept_with_them() -> None:
    subject, told = shared(BLOCKS, "sim:rtx3090"), list[str]()
    limit = int(0.487 * subject.original.peak_bytes)
    goal = Objective(memory_limit=limit)
    assert subject.lower_bound < limit
    assert not plan_whole(PlanScratch(subject, None), goal, budget=3000).feasible
    found = planned(subject, 0.487, 300, None, told.append)
    assert found.feasible
    assert any("wait for host copies" in line for line in told)
    prove(found.graph, subject.captured.graph)
    assert_sound(subject, found)
    costs = subject.costs({}).nominal
    assert found.latency_ns == elapsed_ns(found.graph, costs)
    alone = sum(costs.nanoseconds(op, found.graph.values) for op in found.graph.ops if op.target not in HOST_COPIES)
    assert found.latency_ns > alone  # it waits
    assert found.latency_bound_ns is not None
    assert found.latency_bound_ns <= found.latency_ns


def test_what_was_begun_is_not_searched_for_again() -> None:
    subject, begun = shared(BLOCKS, "sim:rtx3090"), SearchesFromNothing()
    goal = Objective(memory_limit=int(0.4 * subject.original.peak_bytes))
    of = partial(plan_whole, PlanScratch(subject, None), goal, budget=300, begun=begun)
    first, again = of(), of()
    assert (again.latency_ns, again.peak) == (first.latency_ns, first.peak)
    assert first.states > again.states == 0


def test_limits_that_only_loops_keep_get_full_looks() -> None:
    """Brief looks lead to a plan that is 41% slower than 1.727 of eager's latency."""
    subject = shared("seed-mlp", "sim:rtx3090")
    found = planned(subject, 0.2, None, None)
    assert found.feasible
    assert found.fission
    assert found.latency_ns <= 1.74 * subject.original_ns


def test_the_better_of_two_plans_says_why_it_has_no_loops() -> None:
    goal = Objective(memory_limit=1 << 62)
    plain = planned(shared(BLOCKS, "cpu"), 1.0, 1, None)
    slow = replace(plain, fission="", unsplit="no cut is worth its time", states=2)
    quick = replace(slow, unsplit="", latency_ns=slow.latency_ns - 1, states=3)
    best = better(goal, slow, quick)
    assert (best.latency_ns, best.unsplit, best.states) == (quick.latency_ns, slow.unsplit, 5)
    assert better(goal, slow, replace(quick, fission="a loop")).unsplit == ""


@pytest.mark.parametrize(
    ("device", "budget", "share"),
    [
        ("cpu", 500, 1.0),
        ("cpu", None, planning.FROM_NOTHING_SHARE),
        ("sim:rtx3090", 500, planning.WHOLE),
        ("sim:rtx3090", None, planning.WHOLE * planning.FROM_NOTHING_SHARE),
    ],
)
def test_the_search_from_nothing_has_its_share_of_a_cap(
    monkeypatch: pytest.MonkeyPatch, device: str, budget: int | None, share: float
) -> None:
    class Given(Exception):  # noqa: N818 (what was given is all that is asked)
        pass

    def spied(*_: object, begun: SearchesFromNothing, **_more: object) -> Plan:
        raise Given(begun)

    monkeypatch.setattr(planning, "plan_whole", spied)
    with pytest.raises(Given) as caught:
        planned(shared(BLOCKS, device), 0.5, budget, 200.0)
    (begun,) = caught.value.args
    assert (begun.deadline.seconds, begun.share) == (200.0, share)


def test_a_search_that_begins_late_has_a_tenth_of_the_cap(clocked: Callable[..., Clock]) -> None:
    clocked()
    deadline = Deadline(100.0)  # each look takes a second, the first one began it
    early = deadline.begin(0.5)
    looks = 1
    while not early():
        looks += 1
    assert looks == 49
    late = deadline.begin(0.5)
    assert [late() for _ in range(10)] == [False] * 9 + [True]
    assert Deadline(None).begin(0.5) is never


def test_a_search_ends_close_to_the_bound_of_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far above eager's latency, which alone would let it go on."""
    subject = shared(BLOCKS, "sim:rtx3090")
    limit = int(0.5 * subject.original.peak_bytes)
    of = partial(plan, subject, memory_limit=limit, latency_limit_ns=None, seconds=None, seed=0, stored=None)
    free, first = of(budget=12_000), of(budget=FROM_NOTHING)
    assert first.feasible
    assert first.latency_ns > ENOUGH * subject.original_ns
    monkeypatch.setattr(plans, "latency_lower_bound", lambda _, asked: first.latency_ns if asked == limit else 0)
    found = of(budget=12_000)
    assert free.latency_ns <= found.latency_ns <= ENOUGH * first.latency_ns
    assert found.states < free.states


def test_a_plan_with_loops_wins_by_a_nanosecond_and_not_when_it_is_as_good() -> None:
    subject = shared(PROJECTED, "sim:rtx3090")
    scratch, limit = PlanScratch(subject, None), int(0.3 * subject.original.peak_bytes)
    wanted = PlanRequest(Objective(memory_limit=limit), 0, 1000)
    plain = replace(planned(subject, 1.0, 1, None), fission="")
    assert not plain.feasible or plain.peak > limit
    cut = plan_with_fission(scratch, wanted, replace(plain, feasible=False))
    assert cut.fission
    for more, wins in ((0, False), (1, True)):
        as_good = replace(plain, planned=cut.planned, latency_ns=cut.latency_ns + more, feasible=cut.feasible)
        assert bool(plan_with_fission(scratch, wanted, as_good).fission) == wins


def test_an_interrupt_leaves_nothing_half_made(clocked: Callable[..., Clock]) -> None:
    """Neither does a cap: later cases of the same subject plan as if nothing had been before."""
    expected = planned(subject_of(PROJECTED, "sim:rtx3090"), 0.3, 1, None)
    subject = subject_of(PROJECTED, "sim:rtx3090")
    looks = 100
    clocked(ends_at=looks)
    with pytest.raises(KeyboardInterrupt):
        planned(subject, 0.3, 1, 1e9)
    clocked()
    planned(subject, 0.3, 1, float(looks))
    found = planned(subject, 0.3, 1, None)
    assert (found.peak, found.latency_ns, found.states) == (expected.peak, expected.latency_ns, expected.states)
