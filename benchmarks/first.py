"""How soon a search has an answer: what a plan is after a few seconds, beside what it is in the end.

    python benchmarks/first.py [name or glob ...] [--seconds 5] [--memory 0.8 0.6 0.4] [--latency 1.1]
        [--device sim:rtx3090] [--preset paper] [--no-end] [--output FILE]

A row per model (all fourteen unless named) and limit: seconds of the wall clock from the captured step to the realized
and verified plan under a cap of ``--seconds`` (which ends stages, and so may be exceeded a little), whether the limit
is kept, the figure (peak as a share of eager's, or latency overhead in %), seconds and figure of the search without
a cap. Every search begins anew. All figures are simulated.
"""

from __future__ import annotations

import argparse
import datetime as dt
import platform
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path

from magis.quiet import before_torch

before_torch()

from cells import Limit

import magis
from magis.models import GATE_NAMES, SEED_NAMES, resolve
from magis.planner.bench import Bench
from magis.planner.planning import plan
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.results import Case

WARMING = "seed-unet"
HEAD = f"{'model':14} {'limit':>8} {'seconds':>8} {'kept':>5} {'figure':>9} {'in the end':>11} {'seconds':>8}"


def planned(case: Case, limit: Limit, cap: float | None) -> tuple[Subject, Plan, float]:
    """A plan of a step captured anew, and the seconds it took from there."""
    subject = Bench().subject(case)
    goal = limit.goal(subject)
    started = time.perf_counter()
    found = plan(
        subject,
        memory_limit=goal.memory_limit,
        latency_limit_ns=goal.latency_limit_ns,
        budget=None,
        seconds=cap,
        seed=0,
        stored=None,
    )
    return subject, found, time.perf_counter() - started


def row(case: Case, limit: Limit, cap: float, *, end: bool) -> tuple[str, bool]:
    """A line, and whether the capped plan keeps its limit."""

    def shown(subject: Subject, found: Plan) -> str:
        if not found.feasible:
            return "missed"
        figure = limit.figure(subject, found.planned.peak_bytes, found.latency_ns)
        return "missed" if figure is None else f"{figure:.4f}" if limit.memory is None else f"{100 * figure:.2f}%"

    subject, found, seconds = planned(case, limit, cap)
    kept = "yes" if found.feasible else "NO"
    line = f"{case.model:14} {limit.text:>8} {seconds:8.2f} {kept:>5} {shown(subject, found):>9}"
    if end:
        subject, found, seconds = planned(case, limit, None)
        line += f" {shown(subject, found):>11} {seconds:8.1f}"
    return line, kept == "yes"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*GATE_NAMES, *SEED_NAMES])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--memory", type=float, nargs="*", default=[0.8, 0.6, 0.4])
    parser.add_argument("--latency", type=float, nargs="*", default=[1.1])
    parser.add_argument("--device", default="sim:rtx3090")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--no-end", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    limits = [*(Limit(memory=each) for each in arguments.memory), *(Limit(latency=each) for each in arguments.latency)]
    versions = f"magis {magis.__version__}, torch {metadata.version('torch')}, numpy {metadata.version('numpy')}"
    lines = [
        f"# {dt.datetime.now(tz=dt.UTC).date()}, {versions}, Python {platform.python_version()}",
        f"# python benchmarks/first.py {shlex.join(sys.argv[1:])}".rstrip(),
        HEAD,
    ]
    print("\n".join(lines), flush=True)
    planned(Case(WARMING, "magis", arguments.device, "small"), Limit(memory=0.4), None)
    every, kept = 0, 0
    for name in resolve(arguments.names):
        for limit in limits:
            case = Case(name, "magis", arguments.device, arguments.preset)
            line, met = row(case, limit, arguments.seconds, end=not arguments.no_end)
            lines.append(line)
            every, kept = every + 1, kept + met
            print(line, flush=True)
            if arguments.output is not None:
                arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines.append(f"{kept} of {every} limits kept under a cap of {arguments.seconds:g} s")
    print(lines[-1])
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
