"""Case of ONNX Runtime: the captured training step, or its inference, is measured or predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from magis.cases.case_rows import NOT_RUN, original_figures, other_result
from magis.cases.comparison import TimingLook, TimingLooks, compare_losses
from magis.extensions.onnx import ort_step
from magis.planner.subject import Subject
from magis.results import Case, CaseResult, StepFigures
from magis.runtime.steps import Step
from magis.strategies.rank_step import check_update, has_dropout, without_dropout
from magis.strategies.strategy_names import OrtName, ort_name

if TYPE_CHECKING:
    from magis.extensions.onnx.export import Exported

ROUNDING, PRECISION = 1e-3, 0.05
"""Allowed relative differences between losses of three steps and eager's: other kernels; lower precision."""
ROUNDS = 12
OFF_BY, NOISE = 0.05, 0.02
"""Allowed relative differences of measured bytes: from predicted bytes; from run to run."""


def ort_result(
    case: Case,
    subject: Subject,
    progress: Callable[[str], None],
    latency_bounds: Sequence[float] = (),
    *,
    rough: bool = False,
) -> CaseResult:
    """Run a case in ONNX Runtime if the original runs on the CPU; else predict it.

    ``latency_bounds`` and ``rough`` are those of `run_case`. Raises UsageError if ONNX Runtime is not installed, for
    operators without an ONNX form, and for operators without a kernel in ONNX Runtime.
    """
    ort_step.check_installed()
    name = ort_name(case.strategy)
    if not name.inference:
        check_update(subject.traced, case.strategy)
    return _OrtCase(case, subject, name, progress, tuple(latency_bounds), rough).result()


@dataclass(frozen=True)
class _OrtCase:
    case: Case
    subject: Subject
    name: OrtName
    progress: Callable[[str], None]
    bounds: tuple[float, ...]
    rough: bool

    def result(self) -> CaseResult:
        from magis.extensions.onnx.ort_memory import MEASURED, PREDICTED, measured_memory, predicted_memory
        from magis.extensions.onnx.ort_session import ort_version

        subject = self.subject
        self.progress("predicting")
        exported = self._exported(dropout=True)
        optimized, name = self.name.optimized, subject.traced.name
        predicted, terms = predicted_memory(exported, optimized=optimized, name=name)
        original = original_figures(subject, measured=self._runs)
        simulated_ms = subject.latency_ns(subject.captured.original.graph) / 1e6
        row = other_result(self.case, subject, original, StepFigures(predicted, simulated_ms))
        found = replace(
            row,
            identity={**row.identity, "onnxruntime": ort_version()},
            off_by=OFF_BY,
            noise=NOISE,
            priced=False,
        )
        if not self._runs:
            return replace(found, note=f"{PREDICTED}; latency is of eager", numbers=NOT_RUN)
        self.progress("measuring in ONNX Runtime")
        memory = measured_memory(exported, optimized=optimized, name=name)
        numbers = self._compare_losses()
        asked = self.case.timing_rounds
        timing = TimingLooks(subject.torch_device, asked or ROUNDS, self.bounds, rough=self.rough and asked is None)
        looks: list[TimingLook] = []  # one timing or two, each with newly built steps
        while not looks or (len(looks) == 1 and timing.wants_another(looks[0])):
            looks.append(timing.look(subject.eager(), self._step(dropout=True)))
        figures = StepFigures(predicted, simulated_ms, memory, looks[0].whole.second_ms)
        # an inference has no ratio: the original is a training step
        ratio = None if self.name.inference else timing.ratio(looks)
        note = MEASURED if not terms else f"{MEASURED}; predicted: {PREDICTED}"
        return replace(found, optimized=figures, ratio=ratio, numbers=numbers, note=note)

    @property
    def _runs(self) -> bool:
        return self.subject.kind == "cpu" and self.subject.runs

    def _exported(self, *, dropout: bool) -> Exported:
        """Return the exported step, cached for all cases that run it."""
        name, subject = self.name, self.subject
        dropout = dropout and has_dropout(subject.traced.module)

        def made() -> Exported:
            work = subject.fresh() if self._runs else subject.traced
            if not dropout and has_dropout(work.module):
                without_dropout(work.module)
            return ort_step.export_step(work, precision=name.precision, inference=name.inference)

        return subject.memo.get(("onnx", name.precision, name.inference, dropout), made)

    def _step(self, *, dropout: bool) -> Step:
        exported = self._exported(dropout=dropout)
        return ort_step.make_ort_step(self.subject.fresh(), exported, optimized=self.name.optimized)

    def _compare_losses(self) -> str:
        """Compare the losses of three steps with eager's, without dropout: ONNX Runtime has its own random numbers."""
        if self.name.inference:
            return f"{NOT_RUN}: an inference has no loss"
        eager = self.subject.eager()
        without_dropout(eager.module)
        off = compare_losses(eager, self._step(dropout=False), self.case.seed)
        lower = self.name.precision != "float32"
        if not off <= (PRECISION if lower else ROUNDING):
            return f"differs: loss by {100 * off:.2g}%"
        return f"other kernels{' and another precision' if lower else ''}: loss within {100 * off:.2g}%"
