"""One case of ranks that run a plan: its limit is a share of what a rank needs without one, which is the original.

The plan is made here, in a fake world, with its memory: each rank runs the same step. Ranks make it anew and agree
on it; what they measure is held against it to the byte, and their losses and weights against the unplanned ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from magis.cases.rank_cases import NOISE, OFF_BY, TIMED, Pool, ranked_result
from magis.errors import UsageError
from magis.planner.planned_ranks import FACTORIES, PlannedRanks
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.predict.rank_memory import fake_world
from magis.ranks import RankJob, RankReport, slowest_ms
from magis.results import Case, CaseResult, RankMemory, SearchOutcome, SearchStats, StepFigures
from magis.simulate.peak_breakdown import changes
from magis.strategies.distributed_names import check_world, plain_of
from magis.strategies.rank_step import World
from magis.strategies.single_device import on_fake_tensors
from magis.units import share_of


def planned_on_ranks(case: Case, subject: Subject, pool: Pool | None, told: Callable[[str], None]) -> CaseResult:
    """Run a case on ranks, or predict it (``pool`` None). UsageError for a case without a memory limit."""
    if case.memory_ratio is None:
        raise UsageError(
            f"strategy {case.strategy!r} needs a memory limit", hint="give a memory ratio (--magis-memory-ratios=0.8)"
        )
    plain = replace(case, strategy=plain_of(case.strategy), memory_ratio=None, budget=None)
    without = subject.memo.get(("ranks", plain.strategy, case.ranks), lambda: ranked_result(plain, subject, pool, told))
    limit = share_of(case.memory_ratio, without.optimized.simulated.tensor_bytes) or 0
    strategy = PlannedRanks(case.strategy).within(limit, case.budget, case.device)
    check_world(strategy, case.ranks)
    told("searching")
    found, eager_ns = _planned(strategy, subject, case.ranks)
    result = _Planned(case, without, found, limit).predicted(eager_ns)
    if pool is None:
        return result
    told(f"measuring on {case.ranks} ranks")
    job = RankJob(case.model, FACTORIES[case.strategy], case.preset, case.dtype, case.seed, case.timing_rounds or TIMED)
    before = subject.memo.get(
        ("weights", plain.strategy, case.ranks),
        lambda: pool(case.ranks, case.device).run(replace(job, strategy=plain.strategy, rounds=0, weights=True)),
    )
    job = replace(job, memory_limit=limit, budget=case.budget, weights=True)
    return _measured(result, pool(case.ranks, case.device).run(job), before)


def _planned(strategy: PlannedRanks, subject: Subject, ranks: int) -> tuple[Plan, int]:
    """The plan of each rank, and the latency of its step without one in nanoseconds."""
    with fake_world(ranks, 0):
        world = World(ranks, 0, subject.kind, fake=True)
        own = strategy.subject(strategy.own_part(on_fake_tensors(subject.make())[1], world))
        return strategy.planned(own), own.original_ns


@dataclass(frozen=True)
class _Planned:
    case: Case
    without: CaseResult
    plan: Plan
    limit: int

    def predicted(self, eager_ns: int) -> CaseResult:
        """With every rank's memory as planned; latencies are of the rank's step alone, planned and not."""
        plan, case = self.plan, self.case
        original = replace(self.without.optimized, simulated_ms=eager_ns / 1e6)
        outcome = {each.name: getattr(plan, each.name) for each in fields(SearchOutcome)}
        return replace(
            self.without,
            case=case,
            original=original,
            optimized=StepFigures(plan.planned, plan.latency_ns / 1e6),
            memory_limit_bytes=self.limit,
            ranks=tuple(RankMemory(rank, predicted=plan.planned) for rank in range(case.ranks)),
            search=SearchStats(**outcome, changes=changes(plan.graph)),
            numbers="not run",
            note="",
            off_by=0.0,
            original_off_by=OFF_BY,
            noise=NOISE,
        )


def _measured(result: CaseResult, reports: tuple[RankReport, ...], before: tuple[RankReport, ...]) -> CaseResult:
    """The result with what the ranks measured, and their numbers beside those of the unplanned ranks."""
    worst = max(reports, key=lambda report: report.memory.tensor_bytes)
    predicted = result.optimized.simulated
    ranks = tuple(RankMemory(each.rank, predicted, each.memory, each.terms) for each in reports)
    off = [each.rank for each in reports if each.memory.tensor_bytes != predicted.tensor_bytes]
    note = f"ranks {', '.join(map(str, off))} measured other tensor bytes than planned" if off else ""
    figures = replace(result.optimized, measured=worst.memory, times_ms=slowest_ms(reports))
    return replace(result, optimized=figures, ranks=ranks, numbers=_numbers(reports, before), note=note)


def _numbers(reports: tuple[RankReport, ...], before: tuple[RankReport, ...]) -> str:
    """How losses and weights after three steps compare with those of the unplanned ranks."""
    losses = [(one.losses, other.losses) for one, other in zip(reports, before, strict=True)]
    if all(one == other for one, other in losses):
        same = all(one.weights == other.weights for one, other in zip(reports, before, strict=True))
        return "bit-identical" if same else "differs: weights after three steps"
    pairs = [
        (x, y) for one, other in losses for x, y in zip(one, other, strict=True) if x is not None and y is not None
    ]
    off = max((abs(x - y) / max(abs(y), 1e-12) for x, y in pairs), default=0.0)
    return (
        f"another order of sums: loss within {100 * off:.2g}%" if off <= 1e-4 else f"differs: loss by {100 * off:.2g}%"
    )
