"""The paper's 28 figures, its method here, and ours: `python benchmarks/paper.py --docs docs/paper.md`.

    python benchmarks/paper.py [model ...] [--latency 1.1 1.05] [--memory 0.8 0.4] [--states 3000] [--output FILE]
                               [--docs docs/paper.md]

The seven networks of the seed at the paper's sizes on a simulated RTX 3090. Under a latency limit a figure is the peak
as a share of eager's, under a memory limit the latency beyond eager's as a share of it. The paper's are read off its
charts (+-0.01). *method*: `magis.run_case` of a case with search "paper" and so many simulated states, *ours*: "magis";
both plans are realized, verified and simulated by the same simulator. Seconds are one core's. Where the paper's peak is
below ours, the lower bound of latency at that peak stands under the table.
"""

from __future__ import annotations

import datetime as dt
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from lib.paper_figures import PAPER_LATENCY, PAPER_MEMORY
from lib.program import arguments, printed

from magis.quiet import before_torch

before_torch()

import torch

import magis
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case, CaseResult
from magis.search.fission_pareto import levels_at, work_of
from magis.search.latency_bound import nest_latency_bound
from magis.search.loop_nest import LoopNest
from magis.simulate.compiled_problem import compile_problem

DEVICE = "sim:rtx3090"
BEGIN, END = "<!-- BEGIN paper -->", "<!-- END paper -->"


@dataclass(frozen=True)
class Reached:
    """What a search reached: the figure (None: the limit is not kept), its seconds, and what it runs in parts."""

    figure: float | None
    seconds: float
    fission: str

    def __str__(self) -> str:
        return "missed" if self.figure is None else f"{self.figure:.3f}"


def reached(case: Case, bench: Bench) -> Reached:
    """Plan a case."""
    started = time.perf_counter()
    result = magis.run_case(case, cache=bench)
    return Reached(_figure(result), time.perf_counter() - started, result.search.fission)


def _figure(result: CaseResult) -> float | None:
    if not result.search.feasible:
        return None
    return result.memory_ratio if result.case.memory_ratio is None else result.latency_ratio - 1.0


def least_ratio(subject: Subject, share: float) -> float:
    """No plan within this share of eager's peak is below this latency, as a ratio to eager's, be the step whole or cut
    at one place into any number of parts that a search tries."""
    limit = int(share * subject.original.peak_bytes)
    work = work_of(subject.aggregated, subject.roofline, reuse=subject.source.reuse)
    cut = (level for number in range(len(work.places)) for _, level in levels_at(work, number))
    whole = LoopNest(compile_problem(subject.normal, subject.roofline, reuse=subject.source.reuse))
    return min(nest_latency_bound(each, limit) for each in (whole, *cut)) / subject.original_ns


def rows(models: list[str], latency: list[float], memory: list[float], states: int) -> Iterator[str]:
    """The table's lines, as they are found."""
    yield "| network | limit | paper | its method here | ours | seconds: method, ours | method runs in parts |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    wins = count = 0
    bounds: list[str] = []
    for model in models:
        bench = Bench()
        for limit in (*(("lat", each) for each in latency), *(("mem", each) for each in memory)):
            kind, ratio = limit
            known = PAPER_LATENCY.get(f"{ratio}", {}) if kind == "lat" else PAPER_MEMORY.get(f"{ratio:g}", {})
            case = Case(f"seed-{model}", "magis", DEVICE, "paper")
            case = replace(case, latency_ratio=ratio) if kind == "lat" else replace(case, memory_ratio=ratio)
            theirs = reached(replace(case, search="paper", budget=states), bench)
            ours = reached(case, bench)
            paper = known.get(model)
            count += 1
            wins += ours.figure is not None and all(
                other is None or ours.figure <= other for other in (paper, theirs.figure)
            )
            if kind == "lat" and paper is not None and (ours.figure is None or paper < ours.figure):
                least, free = (least_ratio(bench.subject(replace(case, slack=s)), paper) for s in (case.slack, 0.0))
                bounds.append(
                    f"{model} within {paper:.3f} of eager's peak takes at least {least:.4f} times its latency"
                    f" ({free:.4f} without slack)."
                )
            yield (
                f"| {model} | {kind} {ratio:g} | {'-' if paper is None else f'{paper:.3f}'} | {theirs} | {ours}"
                f" | {theirs.seconds:.0f}, {ours.seconds:.0f} | {theirs.fission or 'nothing'} |"
            )
    yield ""
    yield f"Ours is at least as good as both in {wins} of {count} cells."
    yield from bounds


def main() -> None:
    """Print the table, and write it where it was asked for."""
    asked = arguments(__doc__, latency=[1.1, 1.05], memory=[0.8, 0.4], states=3000, output=Path, docs=Path)
    asked.add_argument("models", nargs="*", default=list(PAPER_LATENCY["1.1"]))
    options = asked.parse_args()
    begin = f"{dt.date.today()}, torch {torch.__version__}, {options.states} states, {DEVICE}", ""  # noqa: DTZ011
    found = rows(options.models, options.latency, options.memory, options.states)
    text = "\n".join(printed(chain(begin, found), options.output)) + "\n"
    if options.docs:
        before, _, rest = options.docs.read_text(encoding="utf-8").partition(BEGIN)
        options.docs.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
