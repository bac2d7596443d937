"""Pareto fronts of a model, peak memory against latency, faster than one search per limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from magis.capture.workload import Workload
from magis.cost.cards import limit_bytes
from magis.errors import UsageError
from magis.models.step_parts import ORDER, in_one_order, recipe_of
from magis.ops.optimizers import OptimizerSpec
from magis.planner.bench import Bench, Make, default_device
from magis.planner.fission_plan import divide, plan_of_level
from magis.planner.moved_states import with_state_on_host
from magis.planner.plans import Plan, PlanScratch, whole_search
from magis.planner.subject import Subject
from magis.planner.update_lists import worth_planning_with_eager_update
from magis.results import Case, FrontPoint, ParetoFront
from magis.search.budgeted_evaluator import DEFAULT_BUDGET, NO_DEADLINE, Deadline, Objective, PlanRequest
from magis.search.driver import FROM_NOTHING
from magis.search.fission_pareto import HASTY, FissionFront, FissionPoint, joined, whole_front
from magis.search.pareto_sweep import pareto as undominated
from magis.search.pareto_sweep import spread
from magis.units import check_whole, is_number, share_of

POINTS = 32
"""Most points of a front; each is realized and simulated."""
WHOLE = 0.4
"""Share of a time limit by which the front without fission must end."""
MEMORY, LATENCY = (0.8, 0.6, 0.4, 0.3, 0.2), (1.1, 1.05)
"""Shares of eager's peak, and of its latency, for which an extra search runs, as a case with that limit runs it."""


@in_one_order("magis.pareto", ORDER, {"model": "module"})
def pareto(
    module: nn.Module | Workload | tuple[Any, ...] | Callable[[], object] | str,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer | OptimizerSpec | str | None = None,
    *,
    device: str | None = None,
    preset: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    budget: int | None = None,
    seconds: float | None = None,
    slack: float = Case.slack,
    host_limit: str | int = 0,
    points: int = POINTS,
    processes: int = 1,
    resume: Path | None = None,
    cache: Bench | None = None,
    make: Make | None = None,
) -> ParetoFront:
    """Search the Pareto front of a training step, simulated: peak memory against latency.

    Module, batch, loss and optimizer are those of `magis.estimate`; a name is that of a network or
    "package.module:factory". ``make`` builds the workload from a seed and then replaces the factory of that name.

    ``device`` defaults to a GPU if there is one, ``preset`` to "small" on a CPU and "paper" elsewhere. ``budget``
    bounds the states of each search; ``seconds`` cuts the search off, so that the front depends on the machine. Plans
    tolerate host copies that are slower than predicted, by ``slack`` (`magis.results.Case`), and keep up to
    ``host_limit`` of the optimizer's state in host memory. At most ``points`` plans are realized, evenly spread over
    the peaks. ``processes`` share the work, with equal results; the folder ``resume``
    keeps what they find, and a later call continues from there (a ``cache`` has its own of both). Deterministic except
    for ``ParetoFront.seconds``. Raises MagisError for a step that cannot be captured, or a bad argument.
    """
    for what, number, least in (("points", points, 2), ("budget", budget, 1), ("processes", processes, 1)):
        if number is not None:
            check_whole(what, number, least)
    if not (is_number(slack) and 0 <= slack <= Case.MOST_SLACK):
        raise UsageError(f"slack={slack!r}", hint=f"give a number from 0 to {Case.MOST_SLACK}")
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        raise UsageError(f"seconds={seconds!r}", hint="give a number above 0")
    device = default_device() if device is None else device
    preset = ("small" if device == "cpu" else "paper") if preset is None else preset
    name, recipe = recipe_of("magis.pareto", module, batch, loss, optimizer)
    case = Case(name, "magis", device, preset, dtype, seed=seed, budget=budget, seconds=seconds, slack=slack)
    case = replace(case, host_limit=limit_bytes(host_limit, 0))
    bench = Bench(processes=processes, resume=resume) if cache is None else cache
    return front_of(case, bench.subject(case, make or recipe), points)


def front_of(case: Case, subject: Subject, points: int = POINTS) -> ParetoFront:
    """Search the Pareto front of a subject; of the case only names, seed, budget and seconds are used."""
    original = subject.captured.original.graph
    eager_ms = subject.latency_ns(original) / 1e6
    deadline = Deadline(case.seconds)
    found, states = realized_front(subject, budget=case.budget, seed=case.seed, points=points, deadline=deadline)
    eager = FrontPoint(subject.original.peak_bytes, eager_ms, 0, 0, "")
    behind = subject.behind_ns
    planned = [
        FrontPoint(plan.peak, (plan.latency_ns + behind) / 1e6, plan.recomputed_ops, plan.swapped_bytes, plan.fission)
        for plan in found
    ]
    return ParetoFront(
        model=case.model,
        device=case.device,
        preset=case.preset,
        dtype=subject.source.dtype,
        seed=case.seed,
        original=eager,
        lower_bound_bytes=subject.lower_bound,
        points=_with_eager(planned, eager, points),
        states=states,
        seconds=deadline.elapsed(),
        provenance=subject.provenance(original),
    )


def _with_eager(points: Sequence[FrontPoint], eager: FrontPoint, most: int) -> tuple[FrontPoint, ...]:
    """Add eager's step (on a GPU with a foreach update) unless a plan is at least as good in both costs, and drop plans
    that eager beats. If there are then too many points, the one next to the fastest end is dropped."""

    def beats(one: FrontPoint, other: FrontPoint) -> bool:
        return one.peak_bytes <= other.peak_bytes and one.latency_ms <= other.latency_ms

    if any(beats(point, eager) for point in points):
        return tuple(points)
    kept = [point for point in points if not beats(eager, point)]
    if len(kept) >= most:
        del kept[-2 if len(kept) > 2 else -1]
    return (*kept, eager)


def realized_front(
    subject: Subject,
    *,
    budget: int | None = None,
    seed: int = 0,
    points: int = POINTS,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[list[Plan], int]:
    """Search, realize and verify the plans of a front; return them and the number of states evaluated."""
    found, states = list[Plan](), 0
    forms = [PlanScratch(each, None) for each in (subject, worth_planning_with_eager_update(subject)) if each]
    moved = with_state_on_host(subject, subject.host_limit)
    for scratch in (*forms, *([] if moved is None else [PlanScratch(moved, None, ahead=0)])):
        if not (found and deadline.over()):
            plans, tried = _front_of_step(scratch, budget, seed, points, deadline)
            found, states = spread(undominated([*found, *plans]), points), states + tried
    return found, states


def _front_of_step(
    scratch: PlanScratch, budget: int | None, seed: int, points: int, deadline: Deadline
) -> tuple[list[Plan], int]:
    """Search a front as `realized_front` does, for one form of the update."""
    subject = scratch.subject
    budget = DEFAULT_BUDGET if budget is None else budget
    wanted = PlanRequest(Objective(memory_limit=0), seed, budget, deadline.over, subject.original_ns)
    known = scratch.known_to_search(subject.normal)
    costs, reuse = subject.costs(known), subject.source.reuse
    hasty, sketched = whole_front(subject.normal, costs, reuse=reuse, effort=HASTY), subject.sketched(wanted)
    swept = subject.whole_front(known, partial(deadline.over, WHOLE))
    divided = joined(sketched, subject.divided_front(wanted))
    polished = joined(*_search_limits(scratch, swept, divided, wanted))
    # on a CPU, only loops with a lower peak than every plan without loops (docs/notes/fission.md); elsewhere all
    whole = joined(hasty, swept, FissionFront(tuple(point for point in polished.points if point.cut is None), 0))
    leanest = min((point.peak for point in whole.points), default=0)
    every = [*divided.points, *(point for point in polished.points if point.cut is not None)]
    in_parts = [point for point in every if subject.source.device != "cpu" or point.peak < leanest]
    front = undominated([*whole.points, *in_parts])
    chosen = _choose_points(front, points, [min(front, key=_ranked_by(goal)) for goal in _common_limits(subject)])
    plans = [plan_of_level(scratch, each.level, each.solution()) for each in chosen]
    return undominated(plans), hasty.states + swept.states + divided.states + polished.states


def _search_limits(
    scratch: PlanScratch, whole: FissionFront, divided: FissionFront, wanted: PlanRequest
) -> Iterator[FissionFront]:
    """Yield the plans found for each common limit, searched exactly as a case with that limit is. Limits for which the
    front already has a plan that is good enough are skipped."""
    here, subject = whole.points[0].level, scratch.subject
    known = joined(whole, divided)
    for goal in _common_limits(subject):
        best = min(known.points, key=_ranked_by(goal))
        if wanted.over() or wanted.budget <= FROM_NOTHING:
            return
        if scratch.enough(goal, best.peak, best.latency_ns):
            continue
        results, _ = whole_search(
            scratch, here.compiled.problem, goal, wanted.budget, wanted.seed, lambda: whole, over=wanted.over
        )
        plans = (plan for result in results for plan in result.judge.front())
        yield FissionFront(tuple(FissionPoint(here, plan) for plan in plans), sum(each.states for each in results))
        costs = results[0].peak, results[0].latency_ns
        if subject.source.device == "cpu" or scratch.enough(goal, *costs):
            continue
        found = divide(divided, replace(wanted, goal=goal), known=costs)
        if found is not None:
            point = FissionPoint(found.level, found.solution.plan, found.cuts[0], found.solution.inner)
            yield FissionFront((point,), found.states - divided.states)


def _ranked_by(goal: Objective) -> Callable[[FissionPoint], tuple[int, int]]:
    return lambda point: goal.key(point.peak, point.latency_ns)


def _choose_points(front: Sequence[FissionPoint], most: int, asked: Sequence[FissionPoint]) -> list[FissionPoint]:
    """Choose at most ``most`` points, evenly spread over the peaks, including those in ``asked`` if they fit."""
    kept = [point for point in front if any(point is each for each in (*asked, front[0], front[-1]))]
    if len(kept) + 2 > most:
        return spread(front, most)
    others = [point for point in front if not any(point is each for each in kept)]
    return undominated([*kept, *spread(others, most - len(kept))])


def _common_limits(subject: Subject) -> Iterator[Objective]:
    """Yield the memory and latency limits that users request most; those below the lower bound are left out."""
    original = subject.captured.original.graph
    for ratio in MEMORY:
        limit = share_of(ratio, subject.original.peak_bytes)
        if limit is not None and limit >= subject.lower_bound:
            yield Objective(memory_limit=limit)
    for ratio in LATENCY:
        nanoseconds = share_of(ratio, subject.latency_ns(original))
        if nanoseconds is not None:
            yield Objective(latency_limit_ns=max(1, nanoseconds - subject.behind_ns))
