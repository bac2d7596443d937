"""How often the latency gate is wrong: unchanged runs that turn red, and planted slow-downs that do not.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/latency_gate.py [model] [runs] [processes]      (default: bert 30 6)

One process plans and measures one case (memory ratio 0.8); that is the baseline. Then fresh processes plan it again and
time both steps, `runs` times in all as they are and `runs` times with an optimized step that takes 10% longer (it
computes on, as a slower kernel would), each judged by the plugin's verdict at its default tolerance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the plugin does; before torch is loaded

from magis.api.bench import Bench
from magis.api.cases import INTERVAL_WIDTH, MOST_ROUNDS, MOST_SECONDS, TIMING_ROUNDS, WARM_UP, CaseRun
from magis.backend.timing import interleave, ratio_interval
from magis.results import Case, CaseResult
from pytest_magis.baseline_files import read_baseline, write_baseline
from pytest_magis.baselines import stored_case, updated
from pytest_magis.verdict import WORSE, judge

SLOW_DOWN = 0.10
LABEL = "magis-mem0.8"
KINDS = ("unchanged", f"{SLOW_DOWN:.0%} slower")


def case_of(model: str) -> Case:
    return Case(model, "magis", "cpu", "small", memory_ratio=0.8)


def measured(model: str) -> tuple[Bench, CaseRun, CaseResult]:
    bench = Bench()
    case = case_of(model)
    run = CaseRun(case, bench.subject(case))
    result = run.result(None, None)
    if run.graph is None or result.ratio is None or result.optimized.measured_ms is None:
        sys.exit(f"{model}: the case did not run here: {result.note}")
    return bench, run, result


def slower(step: Callable[[], object], busy_ms: float) -> Callable[[], object]:
    """The step, and `busy_ms` milliseconds of computation behind it."""

    def run() -> object:
        result = step()
        end = time.perf_counter() + busy_ms / 1e3
        while time.perf_counter() < end:
            pass
        return result

    return run


def child(model: str, baseline: str, runs: int) -> None:
    """Judge the case against the stored baseline; prints one line of JSON per run."""
    case = case_of(model)
    file = read_baseline(Path(baseline), model, "cpu")
    bench, run, base = measured(model)
    subject = bench.subject(case)
    if run.graph is None or base.optimized.measured_ms is None:
        return
    eager, step = subject.eager(), subject.generated(run.graph)

    def first() -> object:
        eager.prepare()
        return eager.run()

    busy_ms = SLOW_DOWN * base.optimized.measured_ms
    seconds = (step.run, slower(step.run, busy_ms))
    for kind, second in zip(KINDS, seconds, strict=True):
        for _ in range(runs):
            timing = interleave(
                first,
                second,
                rounds=TIMING_ROUNDS,
                warmup=WARM_UP,
                width=INTERVAL_WIDTH,
                most=MOST_ROUNDS * TIMING_ROUNDS,
                seconds=MOST_SECONDS,
            )
            found = ratio_interval(timing)
            verdict = judge(replace(base, ratio=found), stored_case(file, LABEL, case))
            red = any(finding.kind == WORSE for finding in verdict.findings)
            print(json.dumps({"kind": kind, "red": red, "ratio": found.ratio}), flush=True)


def main(model: str = "bert", runs: str = "30", processes: str = "6") -> None:
    _, _, base = measured(model)
    if base.ratio is None:
        return
    print(f"{model} at memory ratio 0.8: baseline ratio {base.ratio.ratio:.3f}, {base.ratio.pairs} pairs", flush=True)
    each = -(-int(runs) // int(processes))
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{model}.json"
        write_baseline(path, updated(None, model, LABEL, case_of(model), base))
        for _ in range(int(processes)):
            command = [sys.executable, __file__, "--child", model, str(path), str(each)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        ratios = sorted(float(str(row["ratio"])) for row in of_kind)
        red = sum(bool(row["red"]) for row in of_kind)
        print(f"{kind:12}: {red:3} of {len(of_kind)} red; ratios {ratios[0]:.3f} .. {ratios[-1]:.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(*sys.argv[1:])
