"""Plans with fission: parts of the step run as loops, where that is worth a summation order other than eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from magis.errors import VerifyError
from magis.fission.loss_suffix import blocked
from magis.fission.proof import verify_fission
from magis.graph import Graph, Op, every_op
from magis.planner.plans import (
    BOUNDED_NODES,
    ENOUGH,
    Plan,
    PlanScratch,
    Searched,
    approached,
    attempts,
    rounded_bound,
)
from magis.planner.subject import Subject
from magis.search.budgeted_evaluator import JudgedPlan, Objective, PlanRequest, never
from magis.search.driver import SearchResult, search
from magis.search.fission_pareto import FissionFront, FissionPoint, LoopPlace, any_enough, joined, place_front
from magis.search.latency_bound import nest_latency_bound
from magis.search.loop_nest import (
    LoopNest,
    LoopNestPlan,
    level,
    nest_lower_bound,
    realize_level,
    solution,
    solve,
    with_body,
)
from magis.search.pareto_sweep import around_best
from magis.search.split_at_peak import relieve, with_loops_beside
from magis.simulate.compiled_problem import Costs
from magis.simulate.evaluator import evaluate
from magis.simulate.problem import Problem

# Fission in the search chooses where to split the step, into how many parts, and what to recompute inside and outside.
# A configuration is a place of the forward pass with a number of parts: all operators from there to the loss and back,
# as far as they can be split, run as a loop (``magis.fission.loss_suffix``). The front of all configurations
# (``magis.search.loop_places``) gives the best ones for a goal; these are planned thoroughly.

FINALISTS = 3
"""Configurations that are improved in turns, the best one thoroughly."""
SQUEEZES = 8
"""Most attempts to lower the peak of a finalist."""
FIRST_SQUEEZE = 8
"""First decrease of the memory limit, as a fraction of the peak (1/8); each failure divides the decrease by 3."""
LEAST_ROOM = 40
"""Smallest distance to the configuration's lower bound, as a fraction of the peak (1/40), that is worth a try."""
FAILURES = 3
"""Failed attempts after which squeezing the peak ends."""
PROOFS = 3
"""Configurations whose loops may fail their proof before fission is given up."""
TURNS = 2
"""Rounds of improving the step around a loop, then the loop body."""


@dataclass(frozen=True, eq=False)
class Divided:
    """A planned step with loops, and the places that are split."""

    cuts: tuple[LoopPlace, ...]
    level: LoopNest
    solution: LoopNestPlan
    states: int = 0


def divide(front: FissionFront, wanted: PlanRequest, *, known: tuple[int, int] | None = None) -> Divided | None:
    """Plan the best configurations of a front with loops thoroughly, and return the best plan for the goal.

    Returns None if none has a loop, or none beats the ``known`` plan (peak in bytes, latency in ns). ``states`` of the
    result includes the front's.
    """
    return _best_divided(front.points, wanted, front.states, known)


def replan(found: Divided, costs: Costs, wanted: PlanRequest, *, reuse: bool) -> Divided:
    """Plan a configuration again with other costs, or for another goal."""
    here = level(found.level.compiled.graph, costs, reuse=reuse, planned=found.level.planned)
    front = place_front([(found.cuts[0], here)], over=wanted.over)
    best = _best_divided(front.points, wanted, front.states, None)
    return found if best is None else best


def _best_divided(
    points: tuple[FissionPoint, ...], wanted: PlanRequest, states: int, known: tuple[int, int] | None
) -> Divided | None:
    """Plan the best configurations of a front thoroughly; return the best plan, None if none beats the ``known``
    one."""
    ranked = sorted(points, key=lambda point: wanted.key(point.peak, point.latency_ns))
    by_cut: dict[LoopPlace | None, FissionPoint] = {}
    for point in ranked:
        by_cut.setdefault(point.cut, point)
    finalists = list(by_cut.values())
    best: Divided | None = None
    near_best: list[FissionPoint] = []
    best_least_ns = 0
    for point in finalists[:FINALISTS]:
        if point.cut is None:
            continue
        least_ns = _latency_bound(point, wanted)
        hoped = wanted.key(0, least_ns)
        if (known is not None and wanted.key(*known) <= hoped) or (best is not None and _key(best, wanted) <= hoped):
            continue  # no plan of this configuration beats a known one
        start = point.solution()
        near_by = around_best([other for other in points if other.cut == point.cut], wanted.goal)
        done = wanted.over() or _is_enough(start, least_ns, wanted)
        solution, spent = (start, 0) if done else _improve_by_turns(point.level, start, wanted, near_by)
        states += spent
        if best is None or wanted.key(solution.peak, solution.latency_ns) < _key(best, wanted):
            best, near_best, best_least_ns = Divided((point.cut,), point.level, solution), near_by, least_ns
            if wanted.enough(solution.peak, solution.latency_ns):
                break
    if best is not None and not (wanted.over() or _is_enough(best.solution, best_least_ns, wanted)):
        solution, spent = _plan_thoroughly(best.level, best.solution, wanted, near_best)
        best, states = replace(best, solution=solution), states + spent
    if best is None or (known is not None and _key(best, wanted) >= wanted.key(*known)):
        return None
    return replace(best, states=states)


def _latency_bound(point: FissionPoint, wanted: PlanRequest) -> int:
    """Return a lower bound in ns of a configuration's latency within a memory limit; 0 if the bound takes too long."""
    limit, levels = wanted.goal.memory_limit, [point.level, *(body for _, body in point.level.loops)]
    if limit is None or wanted.over() or sum(each.compiled.problem.n_nodes for each in levels) > BOUNDED_NODES:
        return 0
    return rounded_bound(nest_latency_bound(point.level, limit), wanted.eager_ns)


def _is_enough(found: LoopNestPlan, least_ns: int, wanted: PlanRequest) -> bool:
    """Return True if a plan is about as fast as eager, or as the lower bound of its configuration."""
    goal = wanted.goal
    if goal.memory_limit is None or not goal.met(found.peak, found.latency_ns):
        return False
    return wanted.enough(found.peak, found.latency_ns) or found.latency_ns <= ENOUGH * least_ns


def _key(divided: Divided, wanted: PlanRequest) -> tuple[int, int]:
    return wanted.key(divided.solution.peak, divided.solution.latency_ns)


def _plan_thoroughly(
    here: LoopNest, start: LoopNestPlan, wanted: PlanRequest, near_by: Sequence[FissionPoint]
) -> tuple[LoopNestPlan, int]:
    """Return the best plan for a configuration, at worst ``start``, and the number of states evaluated."""
    if wanted.goal.memory_limit is None:
        squeezed, states = _squeeze_peak(here, start, wanted)
        last = squeezed if wanted.over() else improve_body(here, squeezed, wanted)
        tried, states = [start, squeezed, last], states + last.states
    else:
        solved = _solve_part(here, wanted.goal, wanted, start)
        tried, states = [start, solved], solved.states
    best = min(tried, key=lambda each: wanted.key(each.peak, each.latency_ns))
    if best is start:
        return best, states
    best, spent = _improve_by_turns(here, best, wanted, near_by)
    return best, states + spent


def _improve_by_turns(
    here: LoopNest, best: LoopNestPlan, wanted: PlanRequest, near_by: Sequence[FissionPoint]
) -> tuple[LoopNestPlan, int]:
    """Improve a plan in turns: the step around the loop, then the loop body within the memory or time that the step
    leaves. Searches also start from the plans of ``near_by``. Returns the plan and the number of states evaluated."""
    around = [point.plan for point in near_by]
    bodies = [point.body.plan for point in near_by if point.body is not None]
    states = 0

    def found(problem: Problem, goal: Objective, starts: Sequence[JudgedPlan], *, swap: bool = True) -> SearchResult:
        budget = max(1, wanted.budget // 4)
        return search(problem, goal, budget=budget, allow_swap=swap, seed=wanted.seed, over=wanted.over, starts=starts)

    for _ in range(TURNS):
        inner = best.inner
        if here.inner is None or inner is None or wanted.over():
            break
        plan = found(best.problem, wanted.goal, [best.plan, *around])
        if plan.key(wanted.goal) < best.plan.key(wanted.goal):
            best = solution(here, best.problem, plan, inner)
        left = _limit_of_body(here.inner, best, inner, wanted.goal)
        body = found(here.inner.compiled.problem, left, [inner.plan, *bodies], swap=inner.copies)
        states += plan.states + body.states
        other = _with_other_body(here, best, solution(here.inner, here.inner.compiled.problem, body, None))
        if other.plan.key(wanted.goal) < best.plan.key(wanted.goal):
            best = other
        if best.inner is inner:
            break  # the step around the same body has been searched
    return best, states


def _limit_of_body(body: LoopNest, planned: LoopNestPlan, inner: LoopNestPlan, goal: Objective) -> Objective:
    """Return the memory or latency limit of a loop body with which the whole step keeps its own limit."""
    if goal.memory_limit is not None:
        return Objective(memory_limit=max(1, goal.memory_limit - planned.around))
    slack = (goal.latency_limit_ns or 0) - planned.latency_ns
    return Objective(latency_limit_ns=max(1, inner.latency_ns + slack // body.parts))


def _squeeze_peak(here: LoopNest, start: LoopNestPlan, wanted: PlanRequest) -> tuple[LoopNestPlan, int]:
    """Lower the peak under a latency limit by searching with memory limits below the best peak so far."""
    floor = nest_lower_bound(here)
    best, states, failures = start, 0, 0
    step = min(start.peak // FIRST_SQUEEZE, (start.peak - floor) // 2)
    for _ in range(SQUEEZES):
        if best.peak - floor < best.peak // LEAST_ROOM:
            break
        tried = _solve_part(here, Objective(memory_limit=max(floor, best.peak - step)), wanted, start)
        states += tried.states
        if wanted.key(tried.peak, tried.latency_ns) < wanted.key(best.peak, best.latency_ns):
            best = tried
        else:
            failures, step = failures + 1, step // 3
        if failures == FAILURES or wanted.over():
            break
    return best, states


def improve_body(here: LoopNest, start: LoopNestPlan, wanted: PlanRequest) -> LoopNestPlan:
    """Plan a loop body with a lower peak within the latency limit; the plan around the loop stays."""
    inner, limit = start.inner, wanted.goal.latency_limit_ns
    if here.inner is None or inner is None or limit is None or start.latency_ns > limit:
        return replace(start, states=0)
    body = _solve_part(here.inner, _limit_of_body(here.inner, start, inner, wanted.goal), wanted, start)
    return _with_other_body(here, start, body, states=1)


def _with_other_body(here: LoopNest, planned: LoopNestPlan, body: LoopNestPlan, states: int = 0) -> LoopNestPlan:
    """Return a step's plan with another loop body; decisions around the loop stay."""
    problem, plan = with_body(here, body), planned.plan
    found = evaluate(problem, plan.order, plan.flags)
    return solution(here, problem, replace(plan, peak=found.peak, latency_ns=found.latency_ns), body, states)


def _solve_part(here: LoopNest, goal: Objective, wanted: PlanRequest, start: LoopNestPlan) -> LoopNestPlan:
    """Plan a step with a loop; host swaps inside the body are allowed only if ``start`` has some."""
    swap = start.inner is not None and start.inner.copies
    return solve(here, replace(wanted, goal=goal, budget=max(1, wanted.budget // 4)), swap_inside=swap)


def worth_dividing(scratch: PlanScratch, goal: Objective, plain: Plan) -> bool:
    """Return True if fission may beat a plan without it.

    On a CPU only steps that miss their limit are split: measured, small parts cost far more time there than the
    roofline predicts (docs/notes/fission.md).
    """
    subject = scratch.subject
    if not plain.feasible:
        return not subject.is_hopeless(goal)
    return subject.source.device != "cpu" and not scratch.enough(goal, plain.peak, plain.latency_ns)


def plan_with_fission(scratch: PlanScratch, wanted: PlanRequest, plain: Plan) -> Plan:
    """Return the best plan with fission, or ``plain`` if that is as good, or if a loop fails its proof. If ``plain``
    misses the limit, a quick search for loops runs even after the time limit."""
    try:
        return _find_plan_with_fission(scratch, wanted, plain)
    except VerifyError as error:
        stopped = plain.stopped_by_seconds or wanted.over()
        return replace(plain, unsplit=f"a cut failed its proof: {error}", stopped_by_seconds=stopped)


def _find_plan_with_fission(scratch: PlanScratch, wanted: PlanRequest, plain: Plan) -> Plan:
    """Return the best plan with fission, or ``plain``. Raises VerifyError if a loop fails its proof. Estimated
    workspaces, which are equal on all machines, decide which part becomes a loop; known ones then plan that loop."""
    subject, goal = scratch.subject, wanted.goal
    graph = subject.aggregated
    known = costs_of(plain)
    front = subject.sketched(wanted, known, wanted.over if plain.feasible else never)
    if not (wanted.over() or any_enough(front.points, wanted)):
        # the best configurations within a memory limit are planned thoroughly anyway, so a brief search of places is
        # enough; but not where only loops keep the limit, since a brief search may miss the limit
        brief = goal.memory_limit is not None and plain.feasible
        front = joined(front, subject.divided_front(wanted, known, brief=brief))
    found = _proved(front, graph, subject, wanted, known)
    attempt, states = None, 0
    if found is not None:
        attempt, states = _attempts_of(scratch, wanted, found), found.states
    elif goal.memory_limit is None or not plain.feasible:
        eased = relieve(graph, subject.roofline, wanted, reuse=subject.source.reuse)
        if eased is not None:
            verify_fission(eased.graph, graph)
            plans = attempts(scratch, eased.graph, budget=wanted.budget, seed=wanted.seed, over=wanted.over)
            loops = name_loops(eased.loops)
            attempt, states = (lambda aim: replace(plans(aim), fission=loops)), eased.states
    if attempt is None:
        return _without_fission(subject, wanted, plain)
    best = approached(goal, attempt)
    verify_fission(best.graph)
    chosen = best if plan_key(goal, best) < plan_key(goal, plain) else _without_fission(subject, wanted, plain)
    return replace(
        chosen,
        states=plain.states + states + best.states,
        workspaces={**plain.workspaces, **best.workspaces},
        stopped_by_seconds=plain.stopped_by_seconds or wanted.over(),
    )


def _proved(
    front: FissionFront, graph: Graph, subject: Subject, wanted: PlanRequest, known: tuple[int, int]
) -> Divided | None:
    """Return the best plan of a front's configurations whose loops are proved; None if none beats the ``known`` plan.
    Raises VerifyError if the best one fails its proof, and no other is left."""
    failure: VerifyError | None = None
    for _ in range(PROOFS):
        found = divide(front, wanted, known=known)
        if found is None:
            break
        try:
            found = _with_loops_beside(found, subject.roofline, wanted, reuse=subject.source.reuse)
            verify_fission(found.level.compiled.graph, graph)
            return found
        except VerifyError as error:
            failure = error
        front = replace(front, points=tuple(point for point in front.points if point.cut not in found.cuts))
    if failure is not None:
        raise failure
    return None


def _with_loops_beside(found: Divided, costs: Costs, wanted: PlanRequest, *, reuse: bool) -> Divided:
    """Return a divided step with more loops, around operators at its peak, if it is to have the lowest peak and has a
    lower one so; else as it is."""
    goal, solved = wanted.goal, found.solution
    if wanted.over() or (goal.memory_limit is not None and goal.met(solved.peak, solved.latency_ns)):
        return found
    here = with_loops_beside(found.level, solved, costs, reuse=reuse)
    if here is None:
        return found
    front = place_front([(found.cuts[0], here)], over=wanted.over)
    best = _best_divided(front.points, wanted, found.states + front.states, None)
    return found if best is None or _key(found, wanted) <= _key(best, wanted) else best


def _without_fission(subject: Subject, wanted: PlanRequest, plain: Plan) -> Plan:
    """Return the plan without fission, with the reason in ``unsplit``."""
    if wanted.over():
        return replace(plain, unsplit="the cap on seconds came first", stopped_by_seconds=True)
    if plain.fission:
        return plain
    return replace(plain, unsplit=blocked(subject.untangled) or "no cut is worth its time")


def costs_of(plan: Plan) -> tuple[int, int]:
    """Return a plan's peak in bytes and its latency in ns."""
    return plan.planned.peak_bytes, plan.latency_ns


def plan_key(goal: Objective, plan: Plan) -> tuple[bool, int, int]:
    """Return a sort key for realized plans, best first."""
    return not plan.feasible, *goal.key(plan.peak, plan.latency_ns)


def _attempts_of(scratch: PlanScratch, wanted: PlanRequest, found: Divided) -> Callable[[Objective], Plan]:
    """Return a function that plans a step, split along its batch, for one goal per call."""
    subject = scratch.subject
    known = scratch.known_to_search(found.level.compiled.graph)

    def attempt(aim: Objective) -> Plan:
        again = replace(found, states=0)  # already planned with these costs
        if known or aim != wanted.goal:
            again = replan(found, subject.costs(known), replace(wanted, goal=aim), reuse=subject.source.reuse)
        plan = plan_of_level(scratch, again.level, again.solution)
        feasible = aim.met(again.solution.peak, again.solution.latency_ns)
        return replace(plan, states=again.states, feasible=feasible)

    return attempt


def plan_of_level(scratch: PlanScratch, level: LoopNest, solution: LoopNestPlan) -> Plan:
    """Realize and verify the plan of a step with or without a loop."""
    graph = realize_level(level, solution)
    fission = next((describe_loop(op) for op in graph.ops if op.body is not None), "")
    searched = Searched(level, solution.peak)
    return scratch.plan(graph, level.compiled.graph, solution.latency_ns, fission=fission, searched=searched)


def describe_loop(loop: Op) -> str:
    """Describe a loop in words: its first module and number of parts."""
    if loop.body is None:
        return ""
    ops = [op for op, _ in every_op(loop.body.graph) if op.body is None]
    through = any("loss" in op.target for op in ops) and any(op.phase == "backward" for op in ops)
    first = next((op.module for op in ops if op.module), "") or "its beginning"
    if through:
        return f"from {first} to the loss and back in {loop.body.parts} parts"
    own = sum(not op.target.startswith("magis.") for op in ops)
    return f"{own} operators from {first} on in {loop.body.parts} parts"


def name_loops(loops: Sequence[str]) -> str:
    """Name several loops in words: the first one, and how many more."""
    first, *others = loops
    return f"{first}, and {len(others)} more" if others else first
