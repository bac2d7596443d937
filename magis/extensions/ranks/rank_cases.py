"""One case of a distributed strategy: predicted on fake tensors, and measured where its ranks can be had."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from magis.capture import Workload
from magis.cases.case_rows import NOT_RUN, original_figures, other_result
from magis.errors import UsageError
from magis.extensions.ranks import RankError, RankJob, RankPool, RankReport, mean_losses, slowest_ms
from magis.extensions.ranks.prediction.step_time import predict_step
from magis.planner.subject import Subject
from magis.results import Case, CaseResult, Memory, RankMemory, StepFigures
from magis.runtime.measure import device_identity
from magis.strategies.distributed_names import check_world, distributed_strategy, is_low_precision, is_own
from magis.strategies.prepared_work import without_dropout
from magis.strategies.rank_step import RankStrategy
from magis.strategies.single_device import on_fake_tensors
from magis.units import median_and_spread

OFF_BY = 0.02
"""Share by which a rank's measured tensor bytes may be off the predicted ones."""
NOISE = 0.05
"""Share by which a rank's peak with scratch differs from run to run: communication has threads of its own."""
ROUNDING = 1e-4
"""Share by which sums in another order may change a loss in three steps; in lower precision it is the latter's."""
PRECISION = 0.05
STEPS_COMPARED = 3
TIMED = 3
"""Steps: their times are printed, not gated."""

Pool = Callable[[int, str], RankPool]
"""Makes the pool of so many ranks on a device, or hands out the one that there is."""


def ranked_result(case: Case, subject: Subject, pool: Pool | None, progress: Callable[[str], None]) -> CaseResult:
    """Run a case on ranks, or predict it (``pool`` None: a simulated device, or a network that ranks cannot import).

    Raises UsageError for a world or a network that the strategy is not for, RankError for ranks that fail.
    """
    chosen = distributed_strategy(case.strategy)
    check_world(chosen, case.ranks)
    run = _RankedCase(case, subject, chosen)
    progress("predicting")
    if pool is None:
        return run.predicted()
    progress(f"measuring on {case.ranks} ranks")
    job = RankJob(case.model, case.strategy, case.preset, case.dtype, case.seed, case.timing_rounds or TIMED)
    try:
        reports = pool(case.ranks, case.device).run(job)
    except RankError as error:
        if not error.out_of_memory:
            raise
        return run.predicted(note=f"{NOT_RUN}: {error}")
    return run.measured(reports)


def predicted_peaks(result: CaseResult, subject: Subject) -> tuple[int, ...]:
    """Bytes of tensors that ranks of a result are predicted to need at most, by their place in a group."""
    case, chosen = result.case, distributed_strategy(result.case.strategy)
    if chosen.group == 1:
        return (result.optimized.simulated.tensor_bytes,)
    known = {each.rank: each.predicted for each in result.ranks}
    run = _RankedCase(case, subject, chosen)
    found = [known.get(rank) or run.predict(rank)[0].predicted for rank in range(chosen.group)]
    return tuple(memory.tensor_bytes for memory in found if memory is not None)


@dataclass(frozen=True)
class _RankedCase:
    case: Case
    subject: Subject
    strategy: RankStrategy

    def predicted(self, note: str = "") -> CaseResult:
        """With every rank predicted that is not like another one (each takes seconds at paper size): the bytes of the
        fullest, the time of the slowest."""
        found = [self.predict(rank) for rank in _distinct(self.case.strategy, self.strategy, self.case.ranks)]
        worst = max((rank.predicted or Memory(0, 0) for rank, _ in found), key=lambda memory: memory.peak_bytes)
        figures = StepFigures(worst, max(ms for _, ms in found))
        original = original_figures(self.subject, measured=self.subject.runs)
        return replace(self._result(original, figures), ranks=tuple(rank for rank, _ in found), note=note)

    def measured(self, reports: tuple[RankReport, ...]) -> CaseResult:
        """With the rank predicted that measured the highest peak."""
        worst = max(reports, key=lambda report: report.memory.tensor_bytes)
        times = slowest_ms(reports)
        ranks = [RankMemory(report.rank, None, report.memory, report.terms) for report in reports]
        foretold_ms: float | None
        try:
            rank, foretold_ms = self.predict(worst.rank)
            foretold = rank.predicted
            note, off_by = "", OFF_BY
            ranks[worst.rank] = replace(ranks[worst.rank], predicted=foretold)
        except UsageError as error:
            if not is_own(self.case.strategy):
                raise
            foretold, foretold_ms, note, off_by = (
                worst.memory,
                median_and_spread(times)[0],
                f"{error}; the figures are the measured ones",
                math.inf,
            )
        figures = StepFigures(foretold or Memory(0, 0), foretold_ms or 0.0, worst.memory, times)
        original = original_figures(self.subject, measured=True)
        threads = worst.identity.get("threads", "")
        identity = {**device_identity(self.case.device), "ranks": f"{self.case.ranks} with {threads} threads"}
        return replace(
            self._result(original, figures),
            ranks=tuple(ranks),
            identity=identity,
            numbers=self._numbers(mean_losses(reports)),
            note=note,
            off_by=off_by,
        )

    def _make(self) -> Workload:
        """The network on fake tensors: a copy of one that is there already, which strategies may change."""
        return on_fake_tensors(self.subject.make())[1]

    def predict(self, rank: int) -> tuple[RankMemory, float]:
        """Memory and milliseconds."""
        subject, case = self.subject, self.case
        try:
            return predict_step(self.strategy, self._make, case.ranks, rank, subject.device_model, subject.kind)
        except Exception as error:
            if isinstance(error, UsageError) or not is_own(case.strategy):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"strategy {case.strategy!r} cannot be predicted, its step does not run on fake tensors: "
                f"{type(error).__name__}: {reason}"
            ) from error

    def _result(self, original: StepFigures, optimized: StepFigures) -> CaseResult:
        return replace(other_result(self.case, self.subject, original, optimized), off_by=OFF_BY, noise=NOISE)

    def _numbers(self, losses: tuple[float, ...]) -> str:
        """How the losses of the ranks together compare with those of one rank that takes the whole batch."""
        parts = int(getattr(self.strategy, "micro_batches", None) or 1)
        normalizes = self.case.ranks * parts > 1 and any(map(_normalizes_alone, self.subject.traced.module.modules()))
        lower = is_low_precision(self.strategy.name)
        if normalizes and (getattr(self.strategy, "stages", 1) > 1 or is_own(self.case.strategy)):
            return f"{NOT_RUN}: of which samples batch norm takes the mean is not known"
        if normalizes and lower:
            return f"{NOT_RUN}: what batch norm makes of a share's rounding in lower precision is no error"
        # in data parallelism, of those of a rank's share of the batch
        expected = self._losses_alone(parts * self.case.ranks // self.strategy.group if normalizes else 1)
        if not losses or len(losses) != len(expected):
            return f"{NOT_RUN}: no rank saw a loss"
        off = max(abs(ours - alone) / max(abs(alone), 1e-12) for ours, alone in zip(losses, expected, strict=True))
        if not off <= (PRECISION if lower else ROUNDING):
            return f"differs: loss by {100 * off:.2g}% of that of one rank"
        whose = "one rank on the shares" if normalizes else "one rank"
        return f"another {'precision' if lower else 'order of sums'}: loss within {100 * off:.2g}% of that of {whose}"

    def _losses_alone(self, shares: int) -> tuple[float, ...]:
        """Of eager, without dropout; computed once for all cases."""
        return self.subject.memo.get(("losses", shares), lambda: self._eager_losses(shares))

    def _eager_losses(self, shares: int) -> tuple[float, ...]:
        step = self.subject.eager(shares=shares)
        without_dropout(step.module)
        losses = []
        torch.manual_seed(self.case.seed)
        for _ in range(STEPS_COMPARED):
            step.prepare()
            losses.append(float(step.run()))
        return tuple(losses if all(map(math.isfinite, losses)) else ())


def _normalizes_alone(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)


def _distinct(name: str, chosen: RankStrategy, size: int) -> tuple[int, ...]:
    """Ranks of which none is like another, or like another with less.

    Replicas are alike, and so are pieces, up to the bytes that do not divide evenly. But `oss` deals out whole
    parameters, and of a strategy of the user's own nothing is known.
    """
    if is_own(name) or name.removeprefix("amp+").startswith("oss"):
        return tuple(range(size))
    return tuple(range(0, min(size, chosen.group), getattr(chosen, "tensor", 1)))
