"""Case of a distributed strategy: predicted on fake tensors, and measured if ranks are available."""

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
from magis.extensions.ranks.prediction.rank_memory import on_stand_ins
from magis.extensions.ranks.prediction.step_time import predict_step
from magis.planner.subject import Subject
from magis.results import Case, CaseResult, Memory, RankMemory, StepFigures
from magis.runtime.measure import device_identity
from magis.strategies.distributed_names import check_world, distributed_strategy, is_low_precision, is_own
from magis.strategies.rank_step import RankStrategy, without_dropout
from magis.units import median_and_spread

OFF_BY = 0.02
"""Allowed relative difference between a rank's measured and predicted tensor bytes."""
NOISE = 0.05
"""Relative run-to-run difference of a rank's peak with workspaces, since communication has its own threads."""
ROUNDING = 1e-4
"""Allowed relative difference of losses in three steps if only the order of sums differs."""
PRECISION = 0.05
"""Allowed relative difference of losses in three steps with lower precision."""
STEPS_COMPARED = 3
TIMED = 3
"""Number of timed steps; their times are printed, not gated."""

Pool = Callable[[int, str], RankPool]
"""Function (number of ranks, device) that returns a pool, created by the first call."""


def ranked_result(case: Case, subject: Subject, pool: Pool | None, progress: Callable[[str], None]) -> CaseResult:
    """Run a case on ranks, or predict it if ``pool`` is None (simulated device, or network that ranks cannot import).

    Raises UsageError for a number of ranks or a network that the strategy does not support, RankError for failed ranks.
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
    """Return the predicted peak bytes of tensors of each rank in a group."""
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
        """Return the predicted result: the bytes of the rank with the highest peak, the time of the slowest.

        Only one of several equal ranks is predicted, since each takes seconds at paper size.
        """
        found = [self.predict(rank) for rank in _distinct_ranks(self.case.strategy, self.strategy, self.case.ranks)]
        worst = max((rank.predicted or Memory(0, 0) for rank, _ in found), key=lambda memory: memory.peak_bytes)
        figures = StepFigures(worst, max(ms for _, ms in found))
        original = original_figures(self.subject, measured=self.subject.runs)
        return replace(self._result(original, figures), ranks=tuple(rank for rank, _ in found), note=note)

    def measured(self, reports: tuple[RankReport, ...]) -> CaseResult:
        """Return the result with measurements, and a prediction for the rank with the highest measured peak."""
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
            numbers=self._compare_losses(mean_losses(reports)),
            note=note,
            off_by=off_by,
        )

    def predict(self, rank: int) -> tuple[RankMemory, float]:
        """Predict memory and milliseconds of a rank."""
        subject, case = self.subject, self.case

        def make_work() -> Workload:
            return on_stand_ins(subject.make())  # a copy, which strategies may change

        try:
            return predict_step(self.strategy, make_work, case.ranks, rank, subject.device_model, subject.kind)
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

    def _compare_losses(self, losses: tuple[float, ...]) -> str:
        """Compare the mean losses of all ranks with those of one rank with the whole batch; the outcome is text."""
        parts = int(getattr(self.strategy, "micro_batches", None) or 1)
        normalizes = self.case.ranks * parts > 1 and any(
            isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
            for part in self.subject.traced.module.modules()
        )
        lower = is_low_precision(self.strategy.name)
        if normalizes and (getattr(self.strategy, "stages", 1) > 1 or is_own(self.case.strategy)):
            return f"{NOT_RUN}: of which samples batch norm takes the mean is not known"
        if normalizes and lower:
            return f"{NOT_RUN}: what batch norm makes of a share's rounding in lower precision is no error"
        # in data parallelism a batch norm takes the mean of the samples of a rank's share of the batch
        shares = parts * self.case.ranks // self.strategy.group if normalizes else 1
        expected = self.subject.memo.get(("losses", shares), lambda: self._eager_losses(shares))
        if not losses or len(losses) != len(expected):
            return f"{NOT_RUN}: no rank saw a loss"
        off = max(abs(ours - alone) / max(abs(alone), 1e-12) for ours, alone in zip(losses, expected, strict=True))
        if not off <= (PRECISION if lower else ROUNDING):
            return f"differs: loss by {100 * off:.2g}% of that of one rank"
        whose = "one rank on the shares" if normalizes else "one rank"
        return f"another {'precision' if lower else 'order of sums'}: loss within {100 * off:.2g}% of that of {whose}"

    def _eager_losses(self, shares: int) -> tuple[float, ...]:
        """Return the losses of eager's first steps without dropout; () if one is not finite."""
        step = self.subject.eager(shares=shares)
        without_dropout(step.module)
        losses = []
        torch.manual_seed(self.case.seed)
        for _ in range(STEPS_COMPARED):
            step.prepare()
            losses.append(float(step.run()))
        return tuple(losses if all(map(math.isfinite, losses)) else ())


def _distinct_ranks(name: str, chosen: RankStrategy, size: int) -> tuple[int, ...]:
    """Return the ranks to predict, which include the ones with the most memory and the most time.

    Replicas are equal, and so are shards, up to bytes that do not divide evenly. But `oss` assigns whole parameters to
    ranks, and a user's own strategy may do anything, so all their ranks are predicted.
    """
    if is_own(name) or name.removeprefix("amp+").startswith("oss"):
        return tuple(range(size))
    return tuple(range(0, min(size, chosen.group), getattr(chosen, "tensor", 1)))
