"""How well a profile of this machine predicts the latency of steps that run on it, original and optimized.

    python benchmarks/predicted.py [--models all] [--ratios 0.8,0.6] [--profile cpu.json] [--repeats 1]

For every network: its operators are measured by themselves (`magis profile`), then the cases run as in the gate, and
what was predicted is set beside what was measured; bytes likewise. A profile that exists is added to, so that nothing
is measured twice; without --profile a fresh one is made and thrown away. Threads as torch has them.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lib.program import arguments

from magis.frontends.profiling import record_profile
from magis.models import resolve
from magis.planner.bench import Bench
from magis.planner.device_profiles import Profiles
from magis.results import Case, CaseResult, StepFigures


def main() -> None:
    """Record, run, print a table and the medians."""
    asked = arguments(__doc__, models="all", ratios="0.8,0.6", profile=Path).parse_args()
    ratios = [float(text) for text in asked.ratios.split(",")]
    errors: list[float] = []
    wrong = 0
    print("model     step      predicted ms  measured ms   error  bytes off  measured/interpolated/estimated")
    with tempfile.TemporaryDirectory() as folder:
        path = asked.profile or Path(folder) / "cpu.json"
        for model in resolve(asked.models.split(",")):
            record_profile(path, [model], device="cpu", preset="small")
            bench = Bench(profiles=Profiles(path))
            for name, step, result in _steps(model, ratios, bench):
                expected, seen = step.simulated_ms, step.measured_ms
                if seen is None or step.measured is None:
                    print(f"{model:9} {name:8} did not run")
                    continue
                off = step.simulated.peak_bytes - step.measured.peak_bytes
                wrong += off != 0
                errors.append(expected / seen - 1)
                rests = result.provenance
                print(
                    f"{model:9} {name:8} {expected:13.1f} {seen:12.1f} {errors[-1]:+7.1%} {off:10}  "
                    f"{rests.measured:.3f} {rests.interpolated:.3f} {rests.estimated:.3f}",
                    flush=True,
                )
    print(f"median error {statistics.median(map(abs, errors)):.1%} of {len(errors)} steps; bytes wrong in {wrong}")


def _steps(model: str, ratios: list[float], bench: Bench) -> Iterator[tuple[str, StepFigures, CaseResult]]:
    eager = bench_run(Case(model, "eager", "cpu", "small"), bench)
    yield "eager", eager.original, eager
    for ratio in ratios:
        found = bench_run(Case(model, "magis", "cpu", "small", memory_ratio=ratio), bench)
        yield f"mem {ratio:g}", found.optimized, found


def bench_run(case: Case, bench: Bench) -> CaseResult:
    """One case, on captures that its model's other cases share."""
    from magis.cases.run_case import run_case

    return run_case(case, cache=bench)


if __name__ == "__main__":
    main()
