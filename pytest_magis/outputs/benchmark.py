"""Latencies in the form of pytest-benchmark's `--benchmark-json`, for tools that read that.

One benchmark a case: the optimized step (of the eager strategy, the original). Times are seconds there. A case keeps
the median and half the interquartile range of its steps: they are `median`, `q1`, `q3`, and, since nothing further out
is known, `min` and `max` too. A simulated latency is exact. Bytes are in `extra_info`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from magis.report import write_text_atomically
from magis.results import CaseResult
from pytest_magis.outcome import Outcome
from pytest_magis.outputs.properties import figures
from pytest_magis.plan import PREFIX

__all__ = ["benchmarks", "write_benchmarks"]

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
