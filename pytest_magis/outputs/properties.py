"""A case in the properties of a JUnit file: one for every figure, beside the whole outcome as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from magis.results import CaseResult
from pytest_magis.outcome import PROPERTY, Outcome

__all__ = ["figures", "readable"]

Properties = list[tuple[str, object]]


def readable(properties: Iterable[tuple[str, object]]) -> Properties:
    """The properties of a report with an outcome's figures, and without its time lines and tables of modules, which are
    long and for this run's outputs."""
    found: Properties = []
    for name, value in properties:
        if name != PROPERTY or not isinstance(value, str):
            found.append((name, value))
            continue
        outcome = Outcome.from_text(value)
        if outcome.result is not None:
            outcome = replace(outcome, result=_short(outcome.result))
        found.append((PROPERTY, outcome.to_text()))
        found.extend(figures(outcome))
    return found


def _short(result: CaseResult) -> CaseResult:
    return replace(
        result,
        original=replace(result.original, at_peak=None),
        optimized=replace(result.optimized, at_peak=None),
        search=replace(result.search, changes=()),
        timelines=None,
    )


def figures(outcome: Outcome) -> Iterator[tuple[str, object]]:
    """Names with their unit, "magis." before them; figures that a case does not have are left out."""
    case, result = outcome.case, outcome.result
    found: dict[str, object | None] = {
        "model": outcome.model,
        "strategy": case.shown,
        "device": case.device,
        "memory_ratio_limit": case.memory_ratio,
        "latency_ratio_limit": case.latency_ratio,
        "verdict": outcome.verdict.label,
        "passed": str(outcome.verdict.passed).lower(),
        "error": " ".join(outcome.error.split()) or None,
    }
    if result is not None:
        found |= {
            "original_tensor_bytes": result.original_memory.tensor_bytes,
            "original_peak_bytes": result.original_memory.peak_bytes,
            "optimized_tensor_bytes": result.memory.tensor_bytes,
            "optimized_peak_bytes": result.memory.peak_bytes,
            "memory_limit_bytes": result.memory_limit_bytes,
            "lower_bound_bytes": result.lower_bound_bytes,
            "memory_ratio": round(result.memory_ratio, 6) if result.original_memory.peak_bytes else None,
            "latency_ratio": _latency_ratio(outcome),
            "original_simulated_ms": result.original.simulated_ms,
            "optimized_simulated_ms": result.optimized.simulated_ms,
            "original_measured_ms": result.original.measured_ms,
            "optimized_measured_ms": result.optimized.measured_ms,
            "numbers": result.numbers,
            "feasible": str(result.search.feasible).lower(),
        }
    yield from ((f"magis.{name}", value) for name, value in found.items() if value is not None)


def _latency_ratio(outcome: Outcome) -> float | None:
    result = outcome.result
    if result is None or (result.ratio is None and not result.original.simulated_ms > 0):
        return None
    return round(result.latency_ratio, 6)
