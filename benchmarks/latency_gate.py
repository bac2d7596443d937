"""How often the latency gate is wrong: unchanged runs that turn red, and planted slow-downs that do not.

    python benchmarks/latency_gate.py [model] [runs] [processes]      (default: bert 30 6)

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
from dataclasses import replace
from pathlib import Path

import torch
from lib.program import arguments

from magis.cases.comparison import TIMING_ROUNDS, once_in_turns
from magis.cases.run_case import CaseRun
from magis.planner.bench import Bench
from magis.results import Case, CaseResult
from magis.runtime.time_slices import Step, TimeSlice
from magis.runtime.timing import StoppingRule, agreed, in_turns
from pytest_magis.baseline_files import read_baseline, write_baseline
from pytest_magis.baselines import stored_case, updated
from pytest_magis.findings import WORSE, Tolerances
from pytest_magis.latency_verdict import latency_bounds
from pytest_magis.verdict import judge

SLOW_DOWN = 0.10
LABEL = "magis-mem0.8"
ATTEMPTS = 5
"""At a baseline with a ratio: a machine that is busy for a moment has none to store."""
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


def slower(step: Step) -> Step:
    """The step, and a tenth of its own time of computation behind it."""
    small = torch.ones(64, 64)

    def run(turn: TimeSlice) -> None:
        step(turn)
        end = turn.spent_ns * (1 + SLOW_DOWN)
        while turn.spent_ns < end:
            torch.mm(small, small)
            turn()

    return run


def child(model: str, baseline: str, runs: int) -> None:
    """Judge the case against the stored baseline; prints one line of JSON per run."""
    case = case_of(model)
    file = read_baseline(Path(baseline), model, "cpu")
    bench, run, base = measured(model)
    subject = bench.subject(case)
    if run.graph is None or not subject.runs_together:
        sys.exit(f"{model}: its steps cannot take turns here")
    stored = stored_case(file, LABEL, case)
    bounds = latency_bounds(stored, Tolerances())
    patience = StoppingRule(TIMING_ROUNDS, bounds)
    for kind, changed in zip(KINDS, (lambda step: step, slower), strict=True):
        for _ in range(runs):
            looks = []
            for _ in range(2):
                step = once_in_turns(subject.generated(run.graph))
                looks.append(in_turns(once_in_turns(subject.eager()), changed(step), patience))
            found = agreed(looks[0], looks[1], bounds)
            verdict = judge(replace(base, ratio=found), stored)
            red = any(finding.kind == WORSE for finding in verdict.findings)
            unsure = any("too uncertain" in note or "not gated" in note for note in verdict.notes)
            row = {"kind": kind, "red": red, "unsure": unsure, "ratio": found.ratio, "pairs": found.pairs}
            print(json.dumps(row), flush=True)


def store(model: str, baseline: str) -> None:
    """Measure the case, until two looks at its ratio agree, and store it."""
    for _ in range(ATTEMPTS):
        _, _, base = measured(model)
        if base.ratio is None or base.ratio.doubt:
            continue
        print(f"{model} at memory ratio 0.8: baseline ratio {base.ratio.ratio:.3f}, {base.ratio.pairs} pairs")
        write_baseline(Path(baseline), updated(None, model, LABEL, case_of(model), base))
        return
    sys.exit(f"nothing to gate against: {'no ratio' if base.ratio is None else base.ratio.doubt}")


def started(*arguments: str) -> str:
    """What a fresh process of this program prints, set up as the plugin sets its process up (`magis.quiet`)."""
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet})
    if done.returncode:
        sys.exit("a process of the benchmark failed, see above")
    return done.stdout


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?", default="bert")
    parser.add_argument("runs", nargs="?", type=int, default=30)
    parser.add_argument("processes", nargs="?", type=int, default=6)
    asked = parser.parse_args()
    model, processes = asked.model, asked.processes
    each = -(-asked.runs // processes)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / f"{model}.json")
        print(started("--store", model, path), end="", flush=True)
        for _ in range(processes):
            printed = started("--child", model, path, str(each))
            rows += [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        ratios = sorted(float(str(row["ratio"])) for row in of_kind)
        red = sum(bool(row["red"]) for row in of_kind)
        unsure = sum(bool(row["unsure"]) for row in of_kind)
        span = f"ratios {ratios[0]:.3f} .. {ratios[-1]:.3f}"
        print(f"{kind:12}: {red:3} of {len(of_kind)} red, {unsure} too uncertain to gate; {span}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1:2] == ["--store"]:
        store(sys.argv[2], sys.argv[3])
    else:
        main()
