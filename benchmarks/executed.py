"""Every plan of every front run for real: measured bytes against the plan's, numbers against eager's.

    python benchmarks/executed.py [name or glob ...] [--points 16] [--device cpu] [--preset small] [--output FILE]

A row per model: points of the front (all networks, real and seed, unless named); for how many measured tensor bytes and
peak are the plan's to the byte; for how many numbers are eager's, bit by bit, or, with fission, as close to the exact
ones as eager's (``magis.cases.comparison``); the largest difference in bytes; seconds, those of the search first.
Whatever is not as it should be stands below its row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from magis.cases.comparison import CLOSE, SAME, compare_by_kind
from magis.extensions.models.network_names import GATE_NAMES, SEED_NAMES
from magis.models import resolve
from magis.planner.bench import Bench
from magis.planner.fronts import realized_front
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.results import Case, Memory
from magis.runtime.measure import collector_spared

HEAD = (
    f"{'model':14} {'points':>6} {'fission':>7} {'bytes equal':>12} {'bit by bit':>11} {'rounding':>9} {'worst B':>8}"
    f" {'search s':>8} {'run s':>7}"
)


@dataclass(frozen=True)
class Run:
    """One plan, run."""

    plan: Plan
    simulated: Memory
    measured: Memory
    numbers: str

    @property
    def off(self) -> int:
        """Bytes between what was planned, simulated and measured."""
        every = (self.plan.planned, self.simulated, self.measured)
        return max(
            max(each.tensor_bytes for each in every) - min(each.tensor_bytes for each in every),
            max(each.peak_bytes for each in every) - min(each.peak_bytes for each in every),
        )

    @property
    def wanted(self) -> str:
        """What the comparison of numbers must say."""
        return CLOSE if self.plan.fission else SAME


def executed(subject: Subject, plan: Plan) -> Run:
    """Run a plan beside eager."""
    eager, step = subject.eager(), subject.generated(plan.graph)
    numbers = compare_by_kind(subject, plan.graph, eager, step, 0)
    return Run(plan, subject.simulate_graph(plan.graph), subject.measure(step), numbers)


def rows(name: str, device: str, preset: str, points: int) -> Iterator[str]:
    """The lines of one model."""
    subject = Bench().subject(Case(name, "magis", device, preset))
    started = time.perf_counter()
    plans, _ = realized_front(subject, points=points)
    searched = time.perf_counter()
    runs = [executed(subject, plan) for plan in plans]
    ran = time.perf_counter()
    whole = [run for run in runs if not run.plan.fission]
    split = [run for run in runs if run.plan.fission]
    yield (
        f"{name:14} {len(runs):6} {len(split):7} {_share(sum(run.off == 0 for run in runs), len(runs)):>12}"
        f" {_share(sum(run.numbers == SAME for run in whole), len(whole)):>11}"
        f" {_share(sum(run.numbers == CLOSE for run in split), len(split)):>9} {max(run.off for run in runs):8}"
        f" {searched - started:8.0f} {ran - searched:7.0f}"
    )
    for number, run in enumerate(runs):
        if run.off or run.numbers != run.wanted:
            yield (
                f"  plan {number} ({run.plan.fission or 'whole'}): numbers {run.numbers};"
                f" planned {run.plan.planned}, simulated {run.simulated}, measured {run.measured}"
            )


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}"


def main() -> None:
    """Print the table."""
    asked = arguments(
        __doc__, names=[*GATE_NAMES, *SEED_NAMES], points=16, device="cpu", preset="small", output=Path
    ).parse_args()
    ran = (rows(name, asked.device, asked.preset, asked.points) for name in resolve(asked.names))
    with collector_spared():
        printed(chain(head(), (HEAD,), chain.from_iterable(ran)), asked.output)


if __name__ == "__main__":
    main()
