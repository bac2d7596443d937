"""A case's figures for other tools: rows of pytest-benchmark's session, properties of a JUnit file.

One benchmark a case: the optimized step (of the eager strategy, the original), in seconds, with every timed step as a
round; a simulated latency is one round. Bytes are in `extra_info`. From there on all is pytest-benchmark's own: its
table, `--benchmark-json`, `--benchmark-save`, `--benchmark-compare-fail`, histograms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from magis.errors import UsageError
from magis.printable import printable
from magis.results import CaseResult
from pytest_magis.run_plan import PREFIX, PROPERTY, Outcome

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
        original=replace(result.original, at_peak=None, times_ms=()),
        optimized=replace(result.optimized, at_peak=None, times_ms=()),
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
        "memory_limit_of": None if case.memory_ratio is None else case.memory_limit_of,
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
            "latency_ratio": _latency_ratio(outcome),
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


def _latency_ratio(outcome: Outcome) -> float | None:
    result = outcome.result
    if result is None or (result.ratio is None and not result.original.simulated_ms > 0):
        return None
    return round(result.latency_ratio, 6)


# A case as a row of pytest-benchmark's session, in the process that has the terminal.

_ASKING = ("benchmark_only", "benchmark_json", "benchmark_save", "benchmark_autosave", "benchmark_histogram")
_COMPARING = "benchmark_compare"


class BenchmarkRows:
    """The cases among the benchmarks of pytest-benchmark's session."""

    def __init__(self, config: pytest.Config, json: Path | None) -> None:
        self._config, self._json = config, json

    def put(self, outcome: Outcome) -> None:
        """Add a case to the benchmarks, in the place of an earlier run of it; not without a latency."""
        session: Any = vars(self._config)["_benchmarksession"]  # which is made after the gate
        session.json = self._json or session.json
        session.benchmarks[:] = [row for row in session.benchmarks if row.fullname != f"{PREFIX}{outcome.name}"]
        if outcome.result is not None and (times := _times_ms(outcome.result)):
            session.benchmarks.append(_row(outcome, outcome.result, times))


def benchmark_rows(config: pytest.Config, json: Path | None) -> BenchmarkRows | None:
    """Where rows of cases go; None where nobody asks for them. `json` is a file for them, as by `--benchmark-json`.

    Raises UsageError where the plugin is switched off, or has a file of its own to write.
    """
    if config.getoption(_COMPARING, default=None) is None:  # an empty list where it is there and not given
        if json is not None:
            raise UsageError("--magis-benchmark-json: pytest-benchmark is not loaded", hint="leave out -p no:benchmark")
        return None
    if json is not None and config.getoption("benchmark_json"):
        raise UsageError("--magis-benchmark-json and --benchmark-json are one option", hint="give one of them")
    asked = json is not None or any(map(config.getoption, (*_ASKING, _COMPARING)))
    return BenchmarkRows(config, json) if asked else None


def _row(outcome: Outcome, result: CaseResult, times_ms: Sequence[float]) -> Any:
    from pytest_benchmark.stats import Metadata

    known = {each.removeprefix("magis."): value for each, value in figures(outcome)}
    case = SimpleNamespace(
        name=outcome.name,
        fullname=f"{PREFIX}{outcome.name}",
        group=outcome.model,
        param=None,
        params=None,
        extra_info=known | {"simulated": not result.optimized.is_measured},
        cprofile_stats=None,
        has_error=False,
    )
    row = Metadata(case, iterations=1, options={})  # type: ignore[no-untyped-call]
    for ms in times_ms:
        row.update(ms / 1000)  # type: ignore[no-untyped-call]
    return row


def _times_ms(result: CaseResult) -> tuple[float, ...]:
    step = result.optimized
    if step.is_measured:
        return step.times_ms
    return (step.simulated_ms,) if step.simulated_ms > 0 else ()
