"""From a limit to a verified graph: search, realize, simulate exactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from magis import registry
from magis.errors import UsageError
from magis.planner.fission_plan import costs_of, plan_key, plan_with_fission, worth_dividing
from magis.planner.kept_plans import KeptPlans
from magis.planner.plans import (
    Decisions,
    Plan,
    PlanScratch,
    SearchesFromNothing,
    approached,
    attempts,
    reuse_decisions,
    with_latency_bound,
)
from magis.planner.search_progress import BestSoFar
from magis.planner.subject import Subject
from magis.progress import Progress
from magis.runtime.measure import collector_spared
from magis.search.budgeted_evaluator import DEFAULT_BUDGET, Objective, Over, PlanRequest, never
from magis.search.driver import FROM_NOTHING
from magis.search.fission_pareto import MOST_OPERATORS, FissionFront
from magis.search.pareto_sweep import BRIEF, FULL
from magis.simulate.compiled_problem import compile_problem

WHOLE = 0.45
"""Share of a cap on seconds by which the search without fission must end. Some limits cannot be kept without fission,
which has the rest. On a CPU, where that is seldom: all of it."""
FROM_NOTHING_SHARE, FRONT_SHARE = 0.6, 0.8
"""Shares of that by which the search from nothing, and the front for the search that goes on from it, must end; where
loops come before the front, its share is of the whole cap."""
LATE = 0.8
"""Share of the cap from which on a plan that keeps its limit is realized and checked, and nothing else begins."""
AT_ONCE = 1000
"""States of the search for the first plan."""
ROUNDS = 5
"""Most searches for a limit on reserved bytes."""
CLOSE = 0.02
"""Share of that limit that is not worth another search."""


def planning_workspaces(
    subject: Subject, stored: Mapping[str, int] | None, expected_graph: str | None
) -> Mapping[str, int] | None:
    """Return the baseline's workspaces if it is about this very graph, else None (this machine's own)."""
    if stored is None or expected_graph != subject.digest:
        return None
    return stored


def plan(
    subject: Subject,
    *,
    memory_limit: int | None,
    latency_limit_ns: int | None,
    budget: int | None,
    seconds: float | None,
    seed: int,
    stored: Mapping[str, int] | None,
    search: str = "magis",
    tell: Progress | None = None,
    known: Collection[Decisions] = (),
) -> Plan:
    """Search under exactly one of the limits and return the best plan, realized.

    ``stored`` is as from ``planning_workspaces``. ``search`` is "magis", or the name of another one in the registry
    ("paper" for the method as it was published).

    Where the subject keeps plans, one that was kept stands for the search; so do ``known`` decisions for steps that
    differ in sizes or numbers alone, where they keep the limit. ``tell`` is told how far it is.
    """
    started = time.perf_counter()
    behind = subject.behind_ns
    goal = Objective(memory_limit, None if latency_limit_ns is None else max(1, latency_limit_ns - behind))
    best_so_far = None if tell is None else BestSoFar(tell, subject, goal)
    scratch = PlanScratch(subject, stored, best_so_far)
    stage: Progress = (lambda _text: None) if best_so_far is None else best_so_far.stage
    if search != "magis":
        stage(f"searching as {search}")
        by = partial(registry.load("search", search), scratch, goal, budget, seconds)
    else:
        budget = DEFAULT_BUDGET if budget is None else budget
        by = partial(_search_all, scratch, goal, budget, seconds, seed, stage)

    def waits() -> bool:
        return bool(compile_problem(subject.normal, subject.roofline).problem.block_waits.idx.size)

    def late() -> bool:
        return seconds is not None and time.perf_counter() - started >= seconds

    def search_for() -> Plan:
        with collector_spared(collect=False):
            found = by()
            if goal.memory_limit is not None and not found.feasible and search == "magis" and waits():
                stage("searching among plans that an error may leave torn")
                torn = plan_whole(replace(scratch, torn=True), goal, budget=budget or 1, seed=seed, over=late)
                found = better(goal, found, torn)
        worth_bounding = subject.simulated_only and not found.stopped_by_seconds
        return with_latency_bound(found, memory_limit) if worth_bounding else replace(found, searched=None)

    carried = reuse_decisions(scratch, goal, known) if known else None
    if carried is not None or subject.kept is None:
        best = carried or search_for()
    else:
        plans = KeptPlans(subject.kept)
        key = plans.key(subject, goal, search, budget, seed, stored)
        kept = plans.load(key, scratch, goal)
        if kept is None:
            kept = search_for()
            plans.save(key, kept, scratch, goal)
        best = kept
    bound = None if best.latency_bound_ns is None else best.latency_bound_ns + behind
    seconds = time.perf_counter() - started
    return replace(best, latency_ns=best.latency_ns + behind, latency_bound_ns=bound, seconds=seconds)


def within_reserved(
    subject: Subject, limit: int, seconds: float | None, search: Callable[[int, float | None], Plan]
) -> Plan:
    """Return the fastest plan for which a GPU's caching allocator reserves at most ``limit`` bytes.

    Without any, the one for which it reserves least (the fastest of several), infeasible. Searches (of a peak, within
    seconds) know peaks alone. So each plan's allocator is simulated. Where it reserves too much, the next search gets a
    limit that is lower by that; once a plan fits, one halfway to the last that did not, since gaps differ from plan to
    plan. Raises UsageError on a CPU.
    """
    started, tried = time.perf_counter(), list[tuple[int, Plan]]()
    target, left = limit, seconds
    stopped = False
    low, high = 0, limit  # limits on the peak: of a plan that fits, and of one that does not
    for _ in range(ROUNDS):
        found = search(target, left)
        nbytes = subject.reserved_by(found.graph)
        if nbytes is None:
            raise UsageError(f"{subject.source.device} reserves nothing")
        tried.append((nbytes, found))
        left = None if seconds is None else seconds - (time.perf_counter() - started)
        low, high = (target, high) if nbytes <= limit else (low, target)
        target = (low + high) // 2 if low else found.peak - (nbytes - limit)
        vain = nbytes > limit and not found.feasible
        if vain or high - low <= CLOSE * limit or target < subject.lower_bound:
            break
        stopped = left is not None and left <= 0
        if stopped:
            break
    nbytes, best = min(tried, key=lambda each: (max(each[0], limit), each[1].latency_ns))
    return replace(
        best,
        feasible=nbytes <= limit,
        latency_bound_ns=None,  # those are of limits on the peak
        states=sum(each.states for _, each in tried),
        seconds=time.perf_counter() - started,
        stopped_by_seconds=stopped or any(each.stopped_by_seconds for _, each in tried),
    )


def _search_all(
    scratch: PlanScratch, goal: Objective, budget: int, seconds: float | None, seed: int, stage: Progress
) -> Plan:
    """Return the best plan of all searches; its seconds are not set."""
    started = time.perf_counter()
    subject = scratch.subject

    def over(share: float = 1.0) -> bool:
        return seconds is not None and time.perf_counter() - started >= share * seconds

    def left() -> float | None:
        return None if seconds is None else max(share * seconds - (time.perf_counter() - started), seconds / 10)

    wanted = PlanRequest(goal, seed, budget, over, subject.original_ns)
    goes_on, on_cpu = budget > FROM_NOTHING, subject.source.device == "cpu"
    whole = 1.0 if on_cpu else WHOLE
    share = whole * (FROM_NOTHING_SHARE if goes_on else 1.0)

    def front(until: float) -> FissionFront:
        stage("searching among plans for all limits")
        effort = BRIEF if len(subject.normal.ops) > MOST_OPERATORS else FULL
        known = scratch.known_to_search(subject.normal)
        return subject.whole_front(known, partial(over, until * FRONT_SHARE), effort)

    def in_loops(plain: Plan) -> Plan:
        stage("searching with parts of the step as loops")
        return plan_with_fission(scratch, replace(wanted, over=late) if plain.feasible else wanted, plain)

    stage("searching")
    late = partial(over, LATE)
    first = find_first_plan(scratch, wanted, late, in_loops) if goes_on and not on_cpu else None
    if first is not None and wanted.enough(first.peak, first.latency_ns):
        return first
    if first is not None and first.feasible and late():
        return replace(first, stopped_by_seconds=True)
    stage("searching")
    begun = SearchesFromNothing()
    by = partial(plan_whole, scratch, goal, seed=seed, left=left, begun=begun)
    loops_first = goes_on and not on_cpu and goal.memory_limit is not None
    early = None if loops_first or not goes_on else partial(front, whole)
    plain = by(budget=FROM_NOTHING if loops_first else budget, over=partial(over, whole), front=early)
    best = plain if first is None else better(goal, plain, first)
    looped = first is not None and bool(first.fission)
    if not looped and worth_dividing(scratch, goal, best):
        best = replace(best, stopped_by_seconds=True) if over() else in_loops(best)
    if loops_first and late():
        return replace(best, stopped_by_seconds=True)
    step = plain.searched.step if best.feasible and plain.searched is not None else None
    if loops_first and not (step and begun.enough(scratch, step.compiled.problem, goal, best.peak, best.latency_ns)):
        # the search that goes on from a front is worth its time only where loops leave something to win
        best = better(goal, best, by(budget=budget, over=over, front=partial(front, 1.0)))
    return best


def better(goal: Objective, one: Plan, other: Plan) -> Plan:
    """Return the better plan, the first if they are equal, with what both took, and why it has no loops."""
    best = other if plan_key(goal, other) < plan_key(goal, one) else one
    return replace(
        best,
        states=one.states + other.states,
        stopped_by_seconds=one.stopped_by_seconds or other.stopped_by_seconds,
        unsplit="" if best.fission else one.unsplit or other.unsplit,
    )


def find_first_plan(scratch: PlanScratch, wanted: PlanRequest, late: Over, in_loops: Callable[[Plan], Plan]) -> Plan:
    """Return a first plan after little work: without fission, or the best one ``in_loops``.

    With loops where a hasty look, done before it is ``late``, halves what the plan costs, and even one without fission
    that is better by a fifth would be worth cutting.
    """
    goal, eager_ns = wanted.goal, wanted.eager_ns
    attempt = attempts(scratch, scratch.subject.normal, budget=AT_ONCE, seed=wanted.seed, brief=True)
    plain = approached(goal, attempt, hopeless=scratch.subject.is_hopeless(goal))
    hoped = replace(plain, latency_ns=eager_ns + (plain.latency_ns - eager_ns) * 4 // 5)
    if not plain.feasible or goal.memory_limit is None or not worth_dividing(scratch, goal, hoped):
        return plain
    points = scratch.subject.sketched(wanted, costs_of(plain), late).points
    half = (eager_ns + plain.latency_ns) // 2
    halved = any(goal.met(point.peak, point.latency_ns) and point.latency_ns <= half for point in points)
    return in_loops(plain) if halved else plain


def plan_whole(
    scratch: PlanScratch,
    goal: Objective,
    *,
    budget: int = DEFAULT_BUDGET,
    seed: int = 0,
    left: Callable[[], float | None] = lambda: None,
    over: Over = never,
    front: Callable[[], FissionFront] | None = None,
    begun: SearchesFromNothing | None = None,
) -> Plan:
    """Return the best plan without fission. ``left`` says how many seconds the search may still take before it goes
    on from a ``front``; ``over`` ends all of it."""
    attempt = attempts(
        scratch, scratch.subject.normal, budget=budget, seed=seed, left=left, over=over, front=front, begun=begun
    )
    return approached(goal, attempt, hopeless=scratch.subject.is_hopeless(goal))
