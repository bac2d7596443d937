"""How soon a search has an answer: what a plan is after a few seconds, beside what it is in the end.

    python benchmarks/first.py [name or glob ...] [--seconds 5] [--memory 0.8 0.6 0.4] [--latency 1.1]
        [--device sim:rtx3090] [--preset paper] [--no-end] [--output FILE]

A row per model (all fourteen unless named) and limit: seconds of the wall clock from the captured step to the realized
and verified plan under a cap of ``--seconds`` (which ends stages, and so may be exceeded a little), whether the limit
is kept, the figure (peak as a share of eager's, or latency overhead in %), seconds and figure of the search without
a cap. Every search begins anew. All figures are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from cells import Limit, planned

from magis.extensions.models.network_names import GATE_NAMES, SEED_NAMES
from magis.models import resolve
from magis.planner.bench import Bench
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.results import Case

WARMING = "seed-unet"
HEAD = f"{'model':14} {'limit':>8} {'seconds':>8} {'kept':>5} {'figure':>9} {'in the end':>11} {'seconds':>8}"


def anew(case: Case, limit: Limit, cap: float | None) -> tuple[Subject, Plan, float]:
    """A plan of a step captured anew, and the seconds it took from there."""
    subject = Bench().subject(case)
    _ = limit.goal(subject)  # captures
    return subject, *planned(subject, limit, cap)


def row(case: Case, limit: Limit, cap: float, *, end: bool) -> tuple[str, bool]:
    """A line, and whether the capped plan keeps its limit."""

    def shown(subject: Subject, found: Plan) -> str:
        if not found.feasible:
            return "missed"
        figure = limit.figure(subject, found.planned.peak_bytes, found.latency_ns)
        return "missed" if figure is None else f"{figure:.4f}" if limit.memory is None else f"{100 * figure:.2f}%"

    subject, found, seconds = anew(case, limit, cap)
    kept = "yes" if found.feasible else "NO"
    line = f"{case.model:14} {limit.text:>8} {seconds:8.2f} {kept:>5} {shown(subject, found):>9}"
    if end:
        subject, found, seconds = anew(case, limit, None)
        line += f" {shown(subject, found):>11} {seconds:8.1f}"
    return line, kept == "yes"


def rows(cases: Sequence[Case], limits: Sequence[Limit], cap: float, *, end: bool) -> Iterator[str]:
    """The lines of the table, and how many limits are kept."""
    yield HEAD
    kept = 0
    for case, limit in product(cases, limits):
        line, met = row(case, limit, cap, end=end)
        kept += met
        yield line
    yield f"{kept} of {len(cases) * len(limits)} limits kept under a cap of {cap:g} s"


def main() -> None:
    """Print the table."""
    asked = arguments(
        __doc__,
        names=[*GATE_NAMES, *SEED_NAMES],
        seconds=5.0,
        memory=[0.8, 0.6, 0.4],
        latency=[1.1],
        device="sim:rtx3090",
        preset="paper",
        no_end=False,
        output=Path,
    ).parse_args()
    limits = [*(Limit(memory=each) for each in asked.memory), *(Limit(latency=each) for each in asked.latency)]
    anew(Case(WARMING, "magis", asked.device, "small"), Limit(memory=0.4), None)
    cases = [Case(name, "magis", asked.device, asked.preset) for name in resolve(asked.names)]
    printed(chain(head(), rows(cases, limits, asked.seconds, end=not asked.no_end)), asked.output)


if __name__ == "__main__":
    main()
