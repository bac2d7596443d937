"""Figures of cases for other tools: rows of pytest-benchmark's session, and properties of a JUnit file.

Each case is one benchmark of the optimized step (with the eager strategy, of the original), in seconds, with every
timed step as a round; a simulated latency is one round. Bytes are in `extra_info`. The table, `--benchmark-json`,
`--benchmark-save`, `--benchmark-compare-fail` and histograms are pytest-benchmark's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from magis.printable import printable
from pytest_magis.run_plan import PREFIX, PROPERTY, Outcome

Properties = list[tuple[str, object]]


def readable(properties: Iterable[tuple[str, object]]) -> Properties:
    """Return a report's properties with the figures of its outcomes added, for JUnit files.

    Time lines and tables of modules are removed from the outcomes, since they are long and serve only this run's
    outputs.
    """
    found: Properties = []
    for name, value in properties:
        if name != PROPERTY or not isinstance(value, str):
            found.append((name, value))
            continue
        outcome = Outcome.from_text(value)
        if (result := outcome.result) is not None:
            short = replace(
                result,
                original=replace(result.original, at_peak=None, times_ms=()),
                optimized=replace(result.optimized, at_peak=None, times_ms=()),
                search=replace(result.search, changes=()),
                timelines=None,
            )
            outcome = replace(outcome, result=short)
        found.append((PROPERTY, outcome.to_text()))
        found.extend(figures(outcome))
    return found


def figures(outcome: Outcome) -> Iterator[tuple[str, object]]:
    """Yield the figures of a case as ("magis.<name with unit>", value), without missing ones."""
    case, result = outcome.case, outcome.result
    found: dict[str, object | None] = {
        "model": outcome.model,
        "strategy": case.shown,
        "device": case.device,
        "memory_ratio_limit": case.memory_ratio,
        "memory_limit_of": case.memory_limit_of if case.limits_memory else None,
        "latency_ratio_limit": case.latency_ratio,
        "verdict": outcome.verdict.label,
        "passed": str(outcome.verdict.passed).lower(),
        "error": outcome.error or None,
    }
    if result is not None:
        found |= {
            "original_tensor_bytes": result.original_memory.tensor_bytes,
            "original_peak_bytes": result.original_memory.peak_bytes,
            "optimized_tensor_bytes": result.memory.tensor_bytes,
            "optimized_peak_bytes": result.memory.peak_bytes,
            "original_reserved_bytes": result.original.reserved_bytes,
            "optimized_reserved_bytes": result.optimized.reserved_bytes,
            "memory_limit_bytes": result.memory_limit_bytes,
            "lower_bound_bytes": result.lower_bound_bytes,
            "memory_ratio": round(result.memory_ratio, 6) if result.original_memory.peak_bytes else None,
            "latency_ratio": round(result.latency_ratio, 6)
            if result.ratio or result.original.simulated_ms > 0
            else None,
            "original_simulated_ms": result.original.simulated_ms,
            "optimized_simulated_ms": result.optimized.simulated_ms,
            "original_measured_ms": result.original.measured_ms,
            "optimized_measured_ms": result.optimized.measured_ms,
            "numbers": result.numbers,
            "feasible": str(result.search.feasible).lower(),
        }
    for name, value in found.items():
        if value is not None:
            yield f"magis.{name}", printable(value) if isinstance(value, str) else value


_ASKING = ("benchmark_only", "benchmark_json", "benchmark_save", "benchmark_autosave", "benchmark_histogram")
_COMPARING = "benchmark_compare"


class BenchmarkRows:
    """Writer of cases into pytest-benchmark's session, in the main process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def put(self, outcome: Outcome) -> None:
        """Add a case if it has a latency, replacing an earlier run of the same case."""
        session: Any = vars(self._config)["_benchmarksession"]  # which is made after the gate
        session.benchmarks[:] = [row for row in session.benchmarks if row.fullname != f"{PREFIX}{outcome.name}"]
        if outcome.result is None:
            return
        step = outcome.result.optimized
        simulated = (step.simulated_ms,) if step.simulated_ms > 0 else ()
        times = step.times_ms if step.is_measured else simulated
        if not times:
            return
        from pytest_benchmark.stats import Metadata

        known = {each.removeprefix("magis."): value for each, value in figures(outcome)}
        case = SimpleNamespace(
            name=outcome.name,
            fullname=f"{PREFIX}{outcome.name}",
            group=outcome.model,
            param=None,
            params=None,
            extra_info=known | {"simulated": not step.is_measured},
            cprofile_stats=None,
            has_error=False,
        )
        row = Metadata(case, iterations=1, options={})  # type: ignore[no-untyped-call]
        for ms in times:
            row.update(ms / 1000)  # type: ignore[no-untyped-call]
        session.benchmarks.append(row)


def benchmark_rows(config: pytest.Config) -> BenchmarkRows | None:
    """Return the writer for pytest-benchmark's session; None if no option needs it, or the plugin is not loaded."""
    asked = any(config.getoption(name, default=None) for name in (*_ASKING, _COMPARING))
    return BenchmarkRows(config) if asked else None
