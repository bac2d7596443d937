"""Case of ranks that run a plan; the limit is a share of a rank's peak without a plan, which is the original.

Plans are made here, with fake process groups: one for each rank of a group, or one for all ranks. Ranks make the plans
again and agree on them; measured tensor bytes must equal the planned ones, and losses and weights are compared with
those of unplanned ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from magis.errors import UsageError
from magis.extensions.ranks import RankJob, RankReport, slowest_ms
from magis.extensions.ranks.plans.planned_ranks import PlannedRanks, factory_of
from magis.extensions.ranks.prediction.rank_memory import fake_world
from magis.extensions.ranks.rank_cases import NOISE, OFF_BY, ROUNDING, TIMED, Pool, predicted_peaks, ranked_result
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.report.text_store import code_digest
from magis.results import Case, CaseResult, RankMemory, SearchOutcome, SearchStats, StepFigures
from magis.simulate.peak_breakdown import changes
from magis.strategies.distributed_names import check_world, plain_of
from magis.strategies.rank_step import World
from magis.strategies.single_device import on_fake_tensors
from magis.units import share_of


def planned_on_ranks(case: Case, subject: Subject, pool: Pool | None, told: Callable[[str], None]) -> CaseResult:
    """Run a case on ranks, or predict it if ``pool`` is None. Raises UsageError for a case without a memory limit."""
    if case.memory_ratio is None:
        raise UsageError(
            f"strategy {case.strategy!r} needs a memory limit", hint="give a memory ratio (--magis-memory-ratios=0.8)"
        )
    plain = replace(case, strategy=plain_of(case.strategy), memory_ratio=None, budget=None)
    without = subject.memo.get(("ranks", plain.strategy, case.ranks), lambda: ranked_result(plain, subject, pool, told))
    peaks = subject.memo.get(("peaks", plain.strategy, case.ranks), lambda: predicted_peaks(without, subject))
    limits = tuple(share_of(case.memory_ratio, peak) or 0 for peak in peaks)
    strategy = PlannedRanks(case.strategy).within(limits, case.budget, case.device)
    check_world(strategy, case.ranks)
    told("searching")
    found = [_plan_rank(strategy, subject, case.ranks, rank) for rank in range(len(limits))]
    result = _predicted(case, without, found, limits)
    if pool is None:
        return result
    told(f"measuring on {case.ranks} ranks")
    job = RankJob(
        case.model, factory_of(case.strategy), case.preset, case.dtype, case.seed, case.timing_rounds or TIMED
    )
    before = subject.memo.get(
        ("weights", plain.strategy, case.ranks),
        lambda: pool(case.ranks, case.device).run(replace(job, strategy=plain.strategy, rounds=0, weights=True)),
    )
    job = replace(job, memory_limits=limits, budget=case.budget, weights=True)
    loops = any(each.plan.fission for each in found)
    return _with_measurements(result, pool(case.ranks, case.device).run(job), before, loops=loops)


class _RankPlan(NamedTuple):
    """Plan of one rank, with the unplanned step's latency in nanoseconds and the lower bound of bytes for any plan."""

    plan: Plan
    eager_ns: int
    least_bytes: int


def _plan_rank(strategy: PlannedRanks, subject: Subject, ranks: int, rank: int) -> _RankPlan:
    with fake_world(ranks, rank):
        world = World(ranks, rank, subject.kind, fake=True)
        own = strategy.subject(strategy.own_part(on_fake_tensors(subject.make())[1], world))
        return _RankPlan(strategy.planned(own, rank), own.original_ns, own.floor_at(own.costs({})).nbytes)


def _predicted(case: Case, without: CaseResult, found: Sequence[_RankPlan], limits: tuple[int, ...]) -> CaseResult:
    """Return the result with every rank's planned memory, and the search's figures of the plan with the highest peak,
    or of one that exceeds its limit; latencies are those of the slowest rank, planned and unplanned."""
    plans = [each.plan for each in found]
    place = max(range(len(plans)), key=lambda at: (not plans[at].feasible, plans[at].peak))
    fullest = plans[place]
    outcome = {each.name: getattr(fullest, each.name) for each in fields(SearchOutcome)}
    outcome |= {
        "feasible": all(each.feasible for each in plans),
        "stopped_by_seconds": any(each.stopped_by_seconds for each in plans),
        "states": sum({id(each): each.states for each in plans}.values()),
    }
    return replace(
        without,
        case=case,
        planner=code_digest()[:12],
        original=replace(without.optimized, simulated_ms=max(each.eager_ns for each in found) / 1e6),
        optimized=StepFigures(fullest.planned, max(each.latency_ns for each in plans) / 1e6),
        memory_limit_bytes=limits[place],
        lower_bound_bytes=found[place].least_bytes,
        ranks=tuple(RankMemory(rank, predicted=plans[rank % len(plans)].planned) for rank in range(case.ranks)),
        search=SearchStats(**outcome, changes=changes(fullest.graph)),
        numbers="not run",
        note="" if fullest.feasible or len(plans) == 1 else f"the limit is that of rank {place}",
        off_by=0.0,
        original_off_by=OFF_BY,
        noise=NOISE,
    )


def _with_measurements(
    result: CaseResult, reports: tuple[RankReport, ...], before: tuple[RankReport, ...], *, loops: bool
) -> CaseResult:
    """Return the result with the ranks' measurements, and the losses and weights compared with unplanned ranks;
    ``loops``: some plan runs loops (fission), which sum in another order."""
    shown = [each for each in reports if result.ranks[each.rank].predicted == result.optimized.simulated]
    worst = max(shown, key=lambda report: report.memory.tensor_bytes)
    ranks = tuple(replace(result.ranks[each.rank], measured=each.memory, terms=each.terms) for each in reports)
    planned = [result.ranks[each.rank].predicted for each in reports]
    pairs = zip(reports, planned, strict=True)
    off = [each.rank for each, own in pairs if own is None or own.tensor_bytes != each.memory.tensor_bytes]
    note = f"ranks {', '.join(map(str, off))} measured other tensor bytes than planned" if off else result.note
    figures = replace(result.optimized, measured=worst.memory, times_ms=slowest_ms(reports))
    return replace(result, optimized=figures, ranks=ranks, numbers=numbers_of(reports, before, loops=loops), note=note)


def numbers_of(reports: Sequence[RankReport], before: Sequence[RankReport], *, loops: bool) -> str:
    """Compare losses and weights after three steps with those of unplanned ranks, and return the outcome as text.

    The comparison is bitwise; with ``loops``, only losses are compared, up to rounding.
    """
    pairs = list(zip(reports, before, strict=True))
    losses = [(x, y) for one, other in pairs for x, y in zip(one.losses, other.losses, strict=True)]
    equal = all(x == y for x, y in losses)
    if equal and all(one.weights == other.weights for one, other in pairs):
        return "bit-identical"
    if equal and not loops:
        return "differs: weights after three steps"
    known = [(x, y) for x, y in losses if x is not None and y is not None]
    off = max((abs(x - y) / max(abs(y), 1e-12) for x, y in known), default=0.0)
    close = loops and off <= ROUNDING
    return f"{'another order of sums: loss within' if close else 'differs: loss by'} {100 * off:.2g}%"
