"""A case's figures for other tools: pytest-benchmark's JSON, properties of a JUnit file.

One benchmark a case: the optimized step (of the eager strategy, the original). Times are seconds there. A case keeps
the median and half the interquartile range of its steps: they are `median`, `q1`, `q3`, and, since nothing further out
is known, `min` and `max` too. A simulated latency is exact. Bytes are in `extra_info`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from magis.report import write_text_atomically
from magis.results import CaseResult
from pytest_magis.outcome import PROPERTY, Outcome
from pytest_magis.run_plan import PREFIX

# A case in the properties of a JUnit file: one for every figure, beside the whole outcome as JSON.

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


VERSION = "4.0.0"
"""Of pytest-benchmark: the form has been the same since."""


def write_benchmarks(path: Path, outcomes: Sequence[Outcome]) -> str:
    """Replace the file by the latencies of this run, and say so in one line. Raises UsageError where that fails."""
    found = benchmarks(outcomes)
    data = {
        "machine_info": _machine(),
        "commit_info": {},
        "benchmarks": found,
        "datetime": datetime.now(UTC).isoformat(),
        "version": VERSION,
    }
    write_text_atomically(path, json.dumps(data, indent=4) + "\n")
    return f"benchmarks: {path} ({len(found)} of {len(outcomes)} cases)"


def benchmarks(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """An entry of every case that has a latency."""
    return [
        _entry(outcome, outcome.result)
        for outcome in outcomes
        if outcome.result is not None and _seconds(outcome.result) is not None
    ]


def _entry(outcome: Outcome, result: CaseResult) -> dict[str, Any]:
    known = {name.removeprefix("magis."): value for name, value in figures(outcome)}
    return {
        "group": outcome.model,
        "name": outcome.name,
        "fullname": f"{PREFIX}{outcome.name}",
        "params": None,
        "param": None,
        "extra_info": known | {"simulated": not result.optimized.is_measured},
        "options": {},
        "stats": _stats(result),
    }


def _seconds(result: CaseResult) -> float | None:
    ms = result.optimized.measured_ms if result.optimized.is_measured else result.optimized.simulated_ms
    return ms / 1000 if ms is not None and ms > 0 else None


def _stats(result: CaseResult) -> dict[str, Any]:
    median = _seconds(result) or 0.0
    half = (result.optimized.spread_ms or 0.0) / 1000 if result.optimized.is_measured else 0.0
    low, high = max(0.0, median - half), median + half
    return {
        "min": low,
        "max": high,
        "mean": median,
        "stddev": half,
        "rounds": 1 if result.ratio is None else result.ratio.pairs,
        "median": median,
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "iqr_outliers": 0,
        "stddev_outliers": 0,
        "outliers": "0;0",
        "ld15iqr": low,
        "hd15iqr": high,
        "ops": 1 / median,
        "total": median,
        "iterations": 1,
    }


def _machine() -> dict[str, Any]:
    return {
        "node": platform.node(),
        "processor": platform.processor(),
        "machine": platform.machine(),
        "python_implementation": platform.python_implementation(),
        "python_version": platform.python_version(),
        "release": platform.release(),
        "system": platform.system(),
        "cpu": {"brand_raw": platform.processor() or platform.machine()},
    }
