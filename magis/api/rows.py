"""What the rows of strategies have in common that are no captured steps of ours: the original, and the frame."""

from __future__ import annotations

from magis.api.alone import NOT_RUN, attempt
from magis.api.insight import Replayed
from magis.api.subject import Subject
from magis.api.values import median
from magis.backend.measure import device_identity
from magis.results import Case, CaseResult, StepFigures
from magis.strategies.base import samples_of

__all__ = ["original_figures", "other_result"]


def original_figures(subject: Subject, *, measured: bool) -> StepFigures:
    """Eager on one rank, which takes the whole batch; not measured where it runs out of memory."""
    captured = subject.captured.original
    memory = attempt(lambda: subject.original_measured) if measured else None
    return StepFigures(
        subject.original,
        subject.latency_ns(captured.graph) / 1e6,
        memory,
        *median(None if memory is None else subject.original_times_ms),
        subject.reserved_bytes(captured.graph, captured.deaths),
        Replayed(subject, captured.graph, captured).at_peak(),
    )


def other_result(case: Case, subject: Subject, original: StepFigures, optimized: StepFigures) -> CaseResult:
    """The result of a case without a limit, whose numbers nobody has compared yet."""
    return CaseResult(
        case=case,
        dtype=subject.source.dtype,
        identity=device_identity(case.device),
        original=original,
        optimized=optimized,
        ratio=None,
        weight_bytes=subject.weight_bytes,
        persistent_bytes=subject.captured.graph.persistent_bytes(),
        memory_limit_bytes=None,
        latency_limit_ms=None,
        device_memory_bytes=subject.roofline.memory_bytes,
        lower_bound_bytes=0,
        numbers=NOT_RUN,
        graph_digest=subject.digest,
        provenance=subject.provenance(subject.captured.original.graph),
        samples=samples_of(subject.traced),
        conformance=subject.conformance,
    )
