"""How often the latency gate is wrong: unchanged runs that turn red, and planted slow-downs that do not.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/latency_gate.py [model] [runs]      (default: bert 30)

One case (memory ratio 0.8) is planned and measured once; that is the baseline. Then both steps are timed again, `runs`
times as they are and `runs` times with an optimized step that takes 10% longer (it computes on, as a slower kernel
would), each judged by the plugin's verdict at its default tolerance.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the plugin does; before torch is loaded

from magis.api.bench import Bench
from magis.api.cases import INTERVAL_WIDTH, MOST_ROUNDS, TIMING_ROUNDS, WARM_UP, CaseRun
from magis.backend.timing import interleave, ratio_interval
from magis.results import Case
from pytest_magis.baselines import stored_case, updated
from pytest_magis.verdict import WORSE, judge

SLOW_DOWN = 0.10
LABEL = "magis-mem0.8"


def slower(step: Callable[[], object], busy_ms: float) -> Callable[[], object]:
    """The step, and `busy_ms` milliseconds of computation behind it."""

    def run() -> object:
        result = step()
        end = time.perf_counter() + busy_ms / 1e3
        while time.perf_counter() < end:
            pass
        return result

    return run


def main(model: str = "bert", runs: str = "30") -> None:
    case = Case(model, "magis", "cpu", "small", memory_ratio=0.8)
    bench = Bench()
    run = CaseRun(case, bench.subject(case))
    base = run.result(None, None)
    if run.graph is None or base.ratio is None or base.optimized.measured_ms is None:
        sys.exit(f"{model}: the case did not run here: {base.note}")
    stored = stored_case(updated(None, model, LABEL, case, base), LABEL, case)
    subject = bench.subject(case)
    eager, step = subject.eager(), subject.generated(run.graph)

    def first() -> object:
        eager.prepare()
        return eager.run()

    busy_ms = SLOW_DOWN * base.optimized.measured_ms
    print(f"{model} at memory ratio 0.8: baseline ratio {base.ratio.ratio:.3f}, {base.ratio.pairs} pairs")
    for name, second in (("unchanged", step.run), (f"{SLOW_DOWN:.0%} slower", slower(step.run, busy_ms))):
        red, ratios = 0, []
        for _ in range(int(runs)):
            timing = interleave(
                first,
                second,
                rounds=TIMING_ROUNDS,
                warmup=WARM_UP,
                width=INTERVAL_WIDTH,
                most=MOST_ROUNDS * TIMING_ROUNDS,
            )
            found = ratio_interval(timing)
            ratios.append(found.ratio)
            verdict = judge(replace(base, ratio=found), stored)
            red += any(finding.kind == WORSE for finding in verdict.findings)
        print(f"{name:12}: {red:3} of {runs} red; ratios {min(ratios):.3f} .. {max(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
