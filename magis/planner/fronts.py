"""The whole front of a model: how much memory for how much time, in seconds rather than one search per limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from magis.errors import UsageError
from magis.planner.bench import Bench, Make, default_device
from magis.planner.fission_plan import plan_of_level
from magis.planner.plans import Plan, PlanScratch, searched
from magis.planner.subject import Subject
from magis.results import Case, FrontPoint, ParetoFront
from magis.search.budgeted_evaluator import DEFAULT_BUDGET, Objective, Over, PlanRequest, never
from magis.search.fission_pareto import HASTY, MOST_OPERATORS, FissionPoint, joined, whole_front
from magis.search.pareto_sweep import BRIEF, FULL, spread
from magis.search.pareto_sweep import pareto as undominated
from magis.units import is_number

POINTS = 32
"""Points of a front at most: each of them is realized and judged."""
WHOLE = 0.4
"""Share of a cap on seconds by which the front without fission must end."""


def pareto(
    model: str,
    *,
    device: str | None = None,
    preset: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    budget: int | None = None,
    seconds: float | None = None,
    slack: float = Case.slack,
    points: int = POINTS,
    processes: int = 1,
    resume: Path | None = None,
    cache: Bench | None = None,
    make: Make | None = None,
) -> ParetoFront:
    """Peak memory against latency of a training step, simulated: a registered model or "package.module:factory"; where
    the name is not what builds the model, ``make`` does, from the seed.

    ``device`` is the default one unless given, ``preset`` "small" on a CPU and "paper" elsewhere. ``budget`` bounds
    the work of cutting the step into parts (states, as for cases); after ``seconds`` of search the front is what was
    found until then, which depends on the machine. Plans stand copies that are slower than predicted, by ``slack``
    (`magis.results.Case`). At most ``points`` plans are realized, evenly spread
    over the peaks. ``processes`` share the work, with the same result; what they have found is kept in the folder
    ``resume``, where a call that was cut off goes on (a ``cache`` has its own of both). Deterministic but for
    the front's own ``seconds``. Raises MagisError for what cannot be captured or asked for.
    """
    for name, number, least in (
        ("points", points, 2),
        ("budget", budget, 1),
        ("seed", seed, 0),
        ("processes", processes, 1),
    ):
        if number is not None and number < least:
            raise UsageError(f"pareto: {name} is {number}, which is less than {least}")
    if not (is_number(slack) and 0 <= slack <= Case.MOST_SLACK):
        raise UsageError(f"pareto: slack is {slack!r}, which is no number from 0 to {Case.MOST_SLACK}")
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        raise UsageError(f"pareto: seconds is {seconds!r}, which is no number above 0")
    device = default_device() if device is None else device
    preset = ("small" if device == "cpu" else "paper") if preset is None else preset
    case = Case(model, "magis", device, preset, dtype, seed=seed, budget=budget, seconds=seconds, slack=slack)
    bench = Bench(processes=processes, resume=resume) if cache is None else cache
    return front_of(case, bench.subject(case, make), points)


def front_of(case: Case, subject: Subject, points: int = POINTS) -> ParetoFront:
    """The front of a subject; of the case only names, seed, budget and seconds count."""
    original = subject.captured.original.graph
    eager_ms = subject.latency_ns(original) / 1e6
    started = time.perf_counter()

    def over(share: float = 1.0, /) -> bool:
        return case.seconds is not None and time.perf_counter() - started >= share * case.seconds

    found, states = realized_front(subject, budget=case.budget, seed=case.seed, points=points, over=over)
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
        seconds=time.perf_counter() - started,
        provenance=subject.provenance(original),
    )


def _with_eager(points: Sequence[FrontPoint], eager: FrontPoint, most: int) -> tuple[FrontPoint, ...]:
    """The points and the step as it is, which updates list by list on a GPU: what no other one beats in both. Where
    they are one too many, the one beside the fastest goes: that is an end of the front."""

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
    over: Callable[..., bool] = lambda *_: False,
) -> tuple[list[Plan], int]:
    """The plan of every point, realized and verified, and the states that were judged; those found until ``over``,
    which is asked with the share of the time that is meant, too."""
    scratch = PlanScratch(subject, None)
    wanted = PlanRequest(Objective(memory_limit=0), seed, DEFAULT_BUDGET if budget is None else budget, over)
    known = scratch.known((subject.captured.original.graph, *searched(subject.normal)))
    costs, reuse = subject.costs(known), subject.source.reuse
    hasty, sketched = whole_front(subject.normal, costs, reuse=reuse, effort=HASTY), subject.sketched
    whole = joined(hasty, subject.whole_front(known, partial(over, WHOLE)))
    divided = joined(sketched, subject.divided_front(wanted))
    # on a CPU only parts that need less memory than any whole step (docs/notes/fission.md), elsewhere all
    leanest = min((point.peak for point in whole.points), default=0)
    in_parts = [point for point in divided.points if subject.source.device != "cpu" or point.peak < leanest]
    chosen = spread(undominated([*whole.points, *in_parts]), points)
    plans = [_plan_of(scratch, point) for point in chosen]
    return undominated(plans), whole.states + divided.states


def _plan_of(scratch: PlanScratch, point: FissionPoint) -> Plan:
    return plan_of_level(scratch, point.level, point.solution(), searched(point.level.compiled.graph))


def best_on_front(scratch: PlanScratch, goal: Objective, plan: Plan, over: Over = never) -> Plan:
    """The plan, or the best one of the whole step's front where that one is better under the goal."""
    large = len(scratch.subject.normal.ops) > MOST_OPERATORS
    front = scratch.subject.whole_front({}, over, BRIEF if large else FULL)
    best = min(front.points, key=lambda point: goal.key(point.peak, point.latency_ns))
    found = _plan_of(scratch, best)
    states, stopped = plan.states + front.states, plan.stopped_by_seconds or over()
    if goal.key(found.peak, found.latency_ns) >= goal.key(plan.peak, plan.latency_ns):
        return replace(plan, states=states, stopped_by_seconds=stopped)
    feasible = goal.met(found.peak, found.latency_ns)
    return replace(found, states=states, feasible=feasible, stopped_by_seconds=stopped)
