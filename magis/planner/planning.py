"""Planning: from a limit to a verified graph (search, realize, simulate exactly)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from magis import registry
from magis.errors import UsageError
from magis.planner.fission_plan import costs_of, plan_key, plan_with_fission, worth_dividing
from magis.planner.kept_plans import KeptPlans
from magis.planner.moved_states import forms_with_moved_state, must_move_state
from magis.planner.plans import (
    Decisions,
    Plan,
    PlanScratch,
    Searched,
    SearchesFromNothing,
    approached,
    attempts,
    reuse_decisions,
    with_latency_bound,
)
from magis.planner.search_progress import BestSoFar
from magis.planner.subject import Subject
from magis.planner.update_lists import worth_planning_with_eager_update
from magis.planner.waiting_plans import HURRIES, with_hurry
from magis.progress import Progress
from magis.runtime.measure import collector_spared
from magis.search.budgeted_evaluator import DEFAULT_BUDGET, Deadline, Objective, Over, PlanRequest, never
from magis.search.driver import FROM_NOTHING
from magis.search.fission_pareto import MOST_OPERATORS, FissionFront
from magis.search.loop_nest import LoopNest
from magis.search.pareto_sweep import BRIEF, FULL
from magis.simulate.compiled_problem import compile_problem

WHOLE = 0.45
"""Share of a time limit by which the search without fission must end, since some limits need fission. On a CPU, which
seldom needs it, that search may use all of the time."""
FROM_NOTHING_SHARE, FRONT_SHARE = 0.6, 0.8
"""Shares of the time without fission by which the search without a starting plan and the front must end. Where loops
are searched before the front, the front's share is of the whole time limit."""
LATE = 0.8
"""Share of the time limit after which no new search begins; the rest is for realizing and checking the plan."""
AT_ONCE = 1000
"""States of the search for the first plan."""
ROUNDS = 5
"""Most searches for a limit on reserved bytes."""
CLOSE = 0.02
"""Interval of peak limits, as a share of the limit on reserved bytes, below which the bisection ends."""


def planning_workspaces(
    subject: Subject, stored: Mapping[str, int] | None, expected_graph: str | None
) -> Mapping[str, int] | None:
    """Return the baseline's workspaces if its graph digest is this graph's, else None (this machine measures them)."""
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
    """Search under exactly one of the two limits and return the best plan, realized.

    ``stored`` is the result of ``planning_workspaces``. ``search`` is "magis", or the name of a registered search
    ("paper" for the published method).

    A plan cached in the subject's folder replaces the search, and so do ``known`` decisions of steps that differ only
    in sizes or scalars, if they keep the limit. ``tell`` receives progress messages.
    """
    deadline = Deadline(seconds)
    behind = subject.behind_ns
    goal = Objective(memory_limit, None if latency_limit_ns is None else max(1, latency_limit_ns - behind))
    best_so_far = None if tell is None else BestSoFar(tell, subject, goal)
    scratch = PlanScratch(subject, stored, best_so_far)
    stage: Progress = (lambda _text: None) if best_so_far is None else best_so_far.stage
    if search != "magis":
        stage(f"searching as {search}")
    elif budget is None:
        budget = DEFAULT_BUDGET

    def by() -> Plan:
        if search != "magis":
            published: Plan = registry.load("search", search)(scratch, goal, budget, seconds)
            return published
        return _search_forms(scratch, goal, budget or 1, deadline, seed, stage)

    def waits() -> bool:
        return bool(compile_problem(subject.normal, subject.roofline).problem.block_waits.idx.size)

    def search_for() -> Plan:
        with collector_spared(collect=False):
            found = by()
            if goal.memory_limit is not None and not found.feasible and search == "magis" and waits():
                stage("searching among plans that an error may leave torn")
                torn = plan_whole(replace(scratch, torn=True), goal, budget=budget or 1, seed=seed, over=deadline.over)
                found = better(goal, found, torn)
        worth_bounding = subject.simulated_only and not found.stopped_by_seconds
        return with_latency_bound(found, memory_limit) if worth_bounding else replace(found, searched=None)

    carried = None
    for step in (subject, worth_planning_with_eager_update(subject, goal)) if known else ():
        if carried is None and step is not None:
            carried = reuse_decisions(replace(scratch, subject=step), goal, known)
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
    return replace(best, latency_ns=best.latency_ns + behind, latency_bound_ns=bound, seconds=deadline.elapsed())


def within_reserved(
    subject: Subject,
    limit: int,
    seconds: float | None,
    search: Callable[[int, float | None], Plan],
    allocator: str = "",
) -> Plan:
    """Return the fastest plan for which a GPU's caching allocator, with these settings, reserves at most ``limit``
    bytes.

    If none fits, return an infeasible one with the fewest reserved bytes. ``search`` (peak limit in bytes, seconds
    left) bounds peaks only, so the allocator is simulated for each plan: until one fits, each search gets a limit lower
    by the excess; then the limit is bisected. Raises UsageError on a CPU.
    """
    deadline, tried = Deadline(seconds), list[tuple[int, Plan]]()
    target, left = limit, seconds
    stopped = False
    low, high = 0, limit  # limits on the peak: the highest that fits, and the lowest that does not
    for _ in range(ROUNDS):
        found = search(target, left)
        nbytes = subject.reserved_bytes(found.graph, allocator)
        if nbytes is None:
            raise UsageError(f"{subject.source.device} reserves nothing")
        tried.append((nbytes, found))
        left = deadline.left()
        low, high = (target, high) if nbytes <= limit else (low, target)
        target = (low + high) // 2 if low else found.peak - (nbytes - limit)
        vain = nbytes > limit and not found.feasible
        if vain or high - low <= CLOSE * limit or target < subject.lower_bound:
            break
        stopped = deadline.over()
        if stopped:
            break
    nbytes, best = min(tried, key=lambda each: (max(each[0], limit), each[1].latency_ns))
    return replace(
        best,
        feasible=nbytes <= limit,
        latency_bound_ns=None,  # latency bounds hold for limits on the peak only
        states=sum(each.states for _, each in tried),
        seconds=deadline.elapsed(),
        stopped_by_seconds=stopped or any(each.stopped_by_seconds for _, each in tried),
    )


def _search_forms(
    scratch: PlanScratch, goal: Objective, budget: int, deadline: Deadline, seed: int, stage: Progress
) -> Plan:
    """Return the best plan of the step's forms: of its update, and with optimizer state in host memory."""
    (form, quick), *others = _forms_of_update(scratch, goal, seed, deadline.over)
    if must_move_state(scratch.subject, goal):  # no plan with all state on the device is worth a search
        best, others = quick or first_attempt(form, goal, seed), []
    else:
        best = _search_all(form, goal, budget, deadline, seed, stage, quick)
    for form, quick in others:
        if not deadline.over():
            best = better(goal, best, _search_all(form, goal, budget, deadline, seed, stage, quick))
    if deadline.over() or scratch.enough(goal, best.peak, best.latency_ns):
        return best
    moved = _form_with_moved_state(scratch, goal, seed, best)
    if moved is not None:
        stage("searching with optimizer state in host memory")
        best = better(goal, best, _search_all(moved[0], goal, budget, deadline, seed, stage, moved[1]))
    if best.feasible or goal.memory_limit is None or goal.memory_limit < scratch.subject.lower_bound:
        return best
    return _with_waits(moved[0] if moved else scratch, goal, budget, deadline, seed, stage, best)


def _search_all(
    scratch: PlanScratch,
    goal: Objective,
    budget: int,
    deadline: Deadline,
    seed: int,
    stage: Progress,
    known: Plan | None = None,
) -> Plan:
    """Return the best plan of several searches, run one after another; its ``seconds`` are not set. ``known``: the
    result of `first_attempt`, if it is there already."""
    subject = scratch.subject
    goes_on, on_cpu = budget > FROM_NOTHING, subject.source.device == "cpu"
    whole = 1.0 if on_cpu else WHOLE
    # on a GPU, loops are searched before the search that continues from a front
    loops_first = goes_on and not on_cpu and goal.memory_limit is not None
    begun = SearchesFromNothing(deadline, whole * (FROM_NOTHING_SHARE if goes_on else 1.0))
    late = partial(deadline.over, LATE)
    wanted = PlanRequest(goal, seed, budget, deadline.over, subject.original_ns)

    def front(until: float) -> FissionFront:
        stage("searching among plans for all limits")
        effort = BRIEF if len(subject.normal.ops) > MOST_OPERATORS else FULL
        workspaces = scratch.known_to_search(subject.normal)
        return subject.whole_front(workspaces, partial(deadline.over, until * FRONT_SHARE), effort)

    def in_loops(best: Plan) -> Plan:
        stage("searching with parts of the step as loops")
        return plan_with_fission(scratch, replace(wanted, over=late) if best.feasible else wanted, best)

    looped = False

    def at_once(_: Plan | None) -> Plan:
        nonlocal looped
        plain = first_attempt(scratch, goal, seed) if known is None else known
        first = find_first_plan(scratch, plain, wanted, late, in_loops)
        looped = bool(first.fission)
        return first

    def from_nothing(best: Plan | None) -> Plan:
        early = partial(front, whole) if goes_on and not loops_first else None
        states = FROM_NOTHING if loops_first else budget
        over = partial(deadline.over, whole)
        found = plan_whole(scratch, goal, budget=states, seed=seed, over=over, front=early, begun=begun)
        return found if best is None else better(goal, found, best)

    def from_front(best: Plan) -> Plan:
        ahead = partial(front, 1.0)
        found = plan_whole(scratch, goal, budget=budget, seed=seed, over=deadline.over, front=ahead, begun=begun)
        return better(goal, best, found)

    def goes_on_from_front(best: Plan) -> bool:
        return loops_first and (late() or not begun.enough(scratch, goal, best.peak, best.latency_ns))

    # Each search, with its condition given the best plan so far. The first plan comes fast, so that even a short time
    # limit yields one. A front is worth its time only where loops leave latency to save.
    searches: list[tuple[Callable[[Plan], bool], Callable[[Any], Plan]]] = [
        (lambda _: True, from_nothing),
        (lambda best: not looped and worth_dividing(scratch, goal, best), in_loops),
        (goes_on_from_front, from_front),
    ]
    if goes_on and not on_cpu:
        searches.insert(0, (lambda _: True, at_once))
    stage("searching")
    (_, begin), *others = searches
    best = begin(None)
    for worth, run in others:
        if wanted.enough(best.peak, best.latency_ns):
            break
        if worth(best):
            if deadline.over(LATE if best.feasible else 1.0):
                return replace(best, stopped_by_seconds=True)
            stage("searching")
            best = run(best)
    return best


def better(goal: Objective, one: Plan, other: Plan) -> Plan:
    """Return the better of two plans (the first on a tie), with the states of both and the reason for no loops."""
    best = other if plan_key(goal, other) < plan_key(goal, one) else one
    return replace(
        best,
        states=one.states + other.states,
        stopped_by_seconds=one.stopped_by_seconds or other.stopped_by_seconds,
        unsplit="" if best.fission else one.unsplit or other.unsplit,
    )


def _forms_of_update(
    scratch: PlanScratch, goal: Objective, seed: int, over: Over
) -> list[tuple[PlanScratch, Plan | None]]:
    """Return the scratch of the step to search, with its `first_attempt` if one was made: with short update lists or,
    if that quick search does better so, with eager's update. Both where that search, which tries no loops, does not
    tell: if it meets the memory limit with neither, or the latency limit with short lists, too.
    """
    other = worth_planning_with_eager_update(scratch.subject, goal)
    if other is None or over():
        return [(scratch, None)]
    forms = [scratch, replace(scratch, subject=other)]
    found = [first_attempt(replace(form, watch=None), goal, seed) for form in forms]
    both: list[tuple[PlanScratch, Plan | None]] = [*zip(forms, found, strict=True)]
    if not any(plan.feasible for plan in found) or (goal.memory_limit is None and found[0].feasible):
        return both
    return both[1:] if plan_key(goal, found[1]) < plan_key(goal, found[0]) else both[:1]


def _form_with_moved_state(
    scratch: PlanScratch, goal: Objective, seed: int, best: Plan
) -> tuple[PlanScratch, Plan] | None:
    """Return the scratch of the step with a share of its state in host memory, and its `first_attempt`: those of the
    share where that is best. None where no state may move, or where all of these are worse than a known plan."""
    forms = [
        replace(scratch, subject=each, ahead=goal.memory_limit or 0)
        for each in forms_with_moved_state(scratch.subject, scratch.subject.host_limit)
    ]
    found = [(form, first_attempt(replace(form, watch=None), goal, seed)) for form in forms]
    quickest = min(found, key=lambda pair: plan_key(goal, pair[1]), default=None)
    if quickest is None or (best.feasible and plan_key(goal, quickest[1]) >= plan_key(goal, best)):
        return None
    return quickest


def _with_waits(
    scratch: PlanScratch, goal: Objective, budget: int, deadline: Deadline, seed: int, stage: Progress, best: Plan
) -> Plan:
    """Return a plan that waits for host copies, or ``best``, which misses the memory limit, where none keeps it.

    A link that is faster than needed gives plans with more copies, thus more waits: if the fastest one leads to a plan,
    short searches with rising speeds follow, until one keeps the limit, and a long search with the speed below.
    """
    subject = scratch.subject
    if not subject.roofline.link_bytes_per_s:
        return best
    stage("searching among plans that wait for host copies")
    still = replace(scratch, watch=None, ahead=goal.memory_limit)  # times of a faster link are none to report
    forms = [replace(still, subject=with_hurry(subject, each)) for each in HURRIES]
    few = min(budget, FROM_NOTHING)

    def search_all(form: PlanScratch, states: int) -> Plan:
        return _search_all(form, goal, states, deadline, seed, lambda _: None)

    found = better(goal, best, plan_whole(forms[-1], goal, budget=few, seed=seed, over=deadline.over))
    for number, form in enumerate(forms[:-1] if found.feasible else ()):
        if deadline.over():
            found = replace(found, stopped_by_seconds=True)
            break
        quick = search_all(form, few)
        found = better(goal, found, quick)
        if quick.feasible:
            if number and budget > FROM_NOTHING:
                found = better(goal, found, search_all(forms[number - 1], budget))
            break
    if found.searched is None or found.fission:
        return found
    costs = subject.costs(scratch.known_to_search(subject.normal)).nominal  # as its latency is
    compiled = compile_problem(subject.normal, costs, reuse=subject.source.reuse)
    return replace(found, searched=Searched(LoopNest(compiled), found.peak))


def first_attempt(scratch: PlanScratch, goal: Objective, seed: int) -> Plan:
    """Return a plan without fission after little work."""
    attempt = attempts(scratch, scratch.subject.normal, budget=AT_ONCE, seed=seed, brief=True)
    return approached(goal, attempt, hopeless=scratch.subject.is_hopeless(goal))


def find_first_plan(
    scratch: PlanScratch, plain: Plan, wanted: PlanRequest, late: Over, in_loops: Callable[[Plan], Plan]
) -> Plan:
    """Return a first plan after little work: the ``plain`` one, without fission, or the best one ``in_loops``.

    Loops are used if a quick search, done before ``late``, halves the latency overhead, and if fission would still pay
    off for a plan with a fifth less overhead.
    """
    goal, eager_ns = wanted.goal, wanted.eager_ns
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
    over: Over = never,
    front: Callable[[], FissionFront] | None = None,
    begun: SearchesFromNothing | None = None,
) -> Plan:
    """Return the best plan without fission, continued from ``front`` if the result in ``begun`` is not enough."""
    attempt = attempts(scratch, scratch.subject.normal, budget=budget, seed=seed, over=over, front=front, begun=begun)
    return approached(goal, attempt, hopeless=scratch.subject.is_hopeless(goal))
