"""What each part of the search is worth: the front of a step with one part left out at a time.

    python benchmarks/ablation.py [name or glob ...] [--latency 1.1] [--memory 0.4] [--device sim:rtx3090]
        [--preset paper] [--only no-mix ...] [--states 3000] [--output FILE]

A row per model (all seed networks unless named) and limit. Under a latency limit a figure is the least peak on the
front as a share of eager's, under a memory limit the least latency overhead to eager, in %; below it the difference to
*full*: of the peak in % of full's, of the latency in % of eager's; "missed": the limit is not kept. All figures are
simulated. Columns: *full*: the front of the whole step and that with fission together; *no-fission*: the first alone;
*no-redo*: nothing is made again, *no-swap*: nothing is swapped, both inside of loops as well; *no-order*: program
order; *no-mix*: plans of a front are not mixed; *no-polish*: their neighbours are not judged; *no-lean*: no proposals
below the leanest plan; *no-rules*: nothing is aggregated first (``magis.rewrite.rules.rule_table``); *no-plan*: the
published search with so many states instead. At the end: for each part the largest gain in any cell.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from magis.quiet import before_torch

before_torch()

from cells import Limit
from lib.program import arguments, head

from magis.extensions.models.network_names import SEED_NAMES
from magis.extensions.paper.coordinated_search import STATES, PaperSearch
from magis.models import resolve
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.fission_pareto import HASTY, Efforts, whole_front
from magis.search.loop_places import divided_front
from magis.search.pareto_sweep import BODY, BRIEF, FULL, Effort

Plans = list[tuple[int, int]]
"""Peaks in bytes and latencies in nanoseconds."""

LEFT_OUT = {
    "no-redo": {"recompute": False},
    "no-swap": {"swap": False},
    "no-order": {"reorder": False},
    "no-mix": {"mixed": 0},
    "no-polish": {"polished": 0},
    "no-lean": {"approaches": ()},
}
COLUMNS = ("full", "no-fission", *LEFT_OUT, "no-rules", "no-plan")
GAIN = 1.0
"""A part that is worth less than so many percent in every cell is named as a candidate for deletion."""


@dataclass(frozen=True)
class Cell:
    """A figure, or None where the limit is missed; and its difference to full's."""

    figure: float | None
    change: float | None


def fronts(subject: Subject, changes: dict[str, object], *, rules: bool = True) -> tuple[Plans, Plans]:
    """The front of the whole step and that with fission."""

    def less(effort: Effort) -> Effort:
        return replace(effort, **changes)  # type: ignore[arg-type]

    graph = subject.aggregated if rules else subject.untangled
    reuse, costs = subject.source.reuse, subject.roofline
    whole = whole_front(subject.normal, costs, reuse=reuse, effort=less(FULL))
    wanted = PlanRequest(Objective(memory_limit=0), 0)
    divided = divided_front(graph, costs, wanted, reuse=reuse, efforts=Efforts(less(BODY), less(BRIEF), less(HASTY)))
    first, second = ([(point.peak, point.latency_ns) for point in found.points] for found in (whole, divided))
    return first, second


def best(subject: Subject, limit: Limit, plans: Plans) -> float | None:
    """The least figure of some plans."""
    goal = limit.goal(subject)
    return limit.figure(subject, *min(plans, key=lambda plan: goal.key(*plan)))


def figures(subject: Subject, limits: Sequence[Limit], column: str, states: int, known: Plans) -> list[float | None]:
    """A column of one model; ``known`` are the plans without fission."""
    if column == "no-plan":
        return [_published(subject, limit, states) for limit in limits]
    if column == "no-fission":
        plans = known
    else:
        whole, divided = fronts(subject, LEFT_OUT.get(column, {}), rules=column != "no-rules")
        plans = [*whole, *divided]
        if column == "full":
            known += whole
    return [best(subject, limit, plans) for limit in limits]


def _published(subject: Subject, limit: Limit, states: int) -> float | None:
    found = PaperSearch(
        subject.untangled, subject.roofline, limit.goal(subject), reuse=subject.source.reuse, states=states
    ).run()
    return best(subject, limit, [(found.figures.peak, found.figures.latency_ns)])


def change(limit: Limit, full: float | None, other: float | None) -> float | None:
    """How much worse than full, in % of its peak or of eager's latency."""
    if full is None or other is None:
        return None
    return 100 * (other / full - 1.0) if limit.memory is None else 100 * (other - full)


def text(name: str, limit: Limit, cells: Sequence[Cell]) -> list[str]:
    """The two lines of a row."""

    def shown(figure: float | None) -> str:
        if figure is None:
            return f"{'missed':>10}"
        return f"{figure:10.4f}" if limit.memory is None else f"{100 * figure:9.2f}%"

    changes = (f"{'':>10}" if cell.change is None else f"{cell.change:+9.2f}%" for cell in cells)
    return [
        f"{name:14} {limit.text:>8} {' '.join(shown(cell.figure) for cell in cells)}".rstrip(),
        f"{'':23} {' '.join(changes)}".rstrip(),
    ]


def summary(rows: Sequence[Sequence[Cell]], columns: Sequence[str]) -> list[str]:
    """What each part gains at most and at least, and in how many cells the limit is kept with it alone."""
    lines = []
    for index, column in enumerate(columns):
        if column == "full":
            continue
        cells = [(row[index], row[0]) for row in rows]
        lost = sum(cell.figure is None and full.figure is not None for cell, full in cells)
        changes = [cell.change for cell, _ in cells if cell.change is not None]
        most, least = max(changes, default=0.0), min(changes, default=0.0)
        verdict = f"gains {most:+.2f}% at most, {least:+.2f}% at least, {lost} limits missed without it"
        if most < GAIN and not lost:
            verdict += f": improves no cell by {GAIN:g}%"
        lines.append(f"{column:10} {verdict}")
    return lines


def main() -> None:
    """Print the table."""
    parser = arguments(
        __doc__,
        names=list(SEED_NAMES),
        latency=[1.1],
        memory=[0.4],
        device="sim:rtx3090",
        preset="paper",
        states=STATES,
        output=Path,
    )
    parser.add_argument("--only", nargs="*", choices=COLUMNS[1:], default=COLUMNS[1:])
    asked = parser.parse_args()
    limits = [*(Limit(latency=each) for each in asked.latency), *(Limit(memory=each) for each in asked.memory)]
    columns = [column for column in COLUMNS if column == "full" or column in asked.only]
    lines = [
        *head(),
        "# peak ratio at a latency limit, latency overhead at a memory limit; below: how much worse than full",
        f"{'model':14} {'limit':>8} {' '.join(f'{column:>10}' for column in columns)}",
    ]
    print("\n".join(lines), flush=True)
    rows: list[list[Cell]] = []
    for name in resolve(asked.names):
        subject = Bench().subject(Case(name, "magis", asked.device, asked.preset))
        found: list[list[float | None]] = []
        seconds: list[float] = []
        whole: Plans = []
        for column in columns:
            started = time.perf_counter()
            found.append(figures(subject, limits, column, asked.states, whole))
            seconds.append(time.perf_counter() - started)
            print(f"  {name} {column}: {found[-1]} in {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
        for number, limit in enumerate(limits):
            row = [Cell(each[number], change(limit, found[0][number], each[number])) for each in found]
            rows.append(row)
            lines += text(name, limit, row)
        lines.append(f"{'':14} {'seconds':>8} {' '.join(f'{each:10.0f}' for each in seconds)}")
        print("\n".join(lines[-2 * len(limits) - 1 :]), flush=True)
        if asked.output is not None:
            asked.output.write_text("\n".join([*lines, "", *summary(rows, columns)]) + "\n", encoding="utf-8")
    print("\n".join(["", *summary(rows, columns)]))


if __name__ == "__main__":
    main()
