"""What fission gains: the lowest peak at a latency limit, without and with it.

    python benchmarks/fission_gain.py [name or glob ...] [--device cpu] [--preset small] [--limit 1.1]
                                      [--plans 1.05 1.1 1.15] [--rounds 8]

Columns: peak ratio and latency ratio, both to eager, of the leanest plan within the limit, without and with fission;
and what runs in parts. On a CPU both figures are measured: one plan is made for each simulated latency ratio of
--plans, and of those measured within the limit (the median of steps that take turns) the leanest counts. On simulated
devices the plan for the limit itself counts, and both figures are simulated. Numbers are compared with eager's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lib.program import arguments

from magis.quiet import before_torch

before_torch()

from magis.cases.comparison import compare_by_kind, once_in_turns
from magis.models import resolve
from magis.planner.bench import Bench
from magis.planner.planning import plan, plan_whole
from magis.planner.plans import Plan, PlanScratch
from magis.planner.subject import Subject
from magis.results import Case
from magis.runtime.timing import StoppingRule, in_turns, ratio_interval
from magis.search.budgeted_evaluator import Objective


@dataclass(frozen=True)
class Point:
    """One plan: ratios to eager."""

    peak: float
    latency: float
    text: str


def plans(subject: Subject, ratio: float) -> tuple[Plan, Plan]:
    """The plans for a simulated latency ratio without and with fission."""
    limit = int(ratio * subject.latency_ns(subject.captured.graph))
    without = plan_whole(PlanScratch(subject, None), Objective(latency_limit_ns=limit))
    with_it = plan(subject, memory_limit=None, latency_limit_ns=limit, budget=None, seconds=None, seed=0, stored=None)
    return without, with_it


def simulated(subject: Subject, found: Plan) -> Point:
    """What the simulator says."""
    original = subject.latency_ns(subject.captured.graph)
    return Point(found.planned.peak_bytes / subject.original.peak_bytes, found.latency_ns / original, found.fission)


def measured(subject: Subject, found: Plan, rounds: int) -> Point:
    """What the machine says; SystemExit if numbers or bytes are not as they should be."""
    eager, step = subject.eager(), subject.generated(found.graph)
    numbers = compare_by_kind(subject, found.graph, eager, step, 0)
    memory = subject.measure(step)
    if numbers.startswith("differs") or memory != subject.simulate_graph(found.graph):
        raise SystemExit(f"{subject.source.name}: numbers {numbers}; {memory}, {subject.simulate_graph(found.graph)}")
    eager.prepare()
    eager.run()
    timing = in_turns(once_in_turns(eager), once_in_turns(step), StoppingRule(rounds, seconds=10.0))
    return Point(memory.peak_bytes / subject.original_measured.peak_bytes, ratio_interval(timing).ratio, found.fission)


def leanest(points: Sequence[Point], limit: float) -> Point | None:
    """The lowest peak within the limit."""
    return min((point for point in points if point.latency <= limit), key=lambda point: point.peak, default=None)


def line(name: str, pairs: Sequence[tuple[Point, Point]], limit: float) -> Iterator[str]:
    """One row, and below it every plan that was tried."""
    without, with_it = (leanest([pair[index] for pair in pairs], limit) for index in (0, 1))
    cells = [f"{p.peak:9.4f} {p.latency:8.3f}" if p else f"{'-':>9} {'-':>8}" for p in (without, with_it)]
    gain = f"{without.peak - with_it.peak:+8.4f}" if without and with_it else f"{'-':>8}"
    yield f"{name:14} {cells[0]}  {cells[1]} {gain}  {with_it.text if with_it else ''}"
    if len(pairs) > 1:
        for one, other in pairs:
            yield f"{'':14} {one.peak:9.4f} {one.latency:8.3f}  {other.peak:9.4f} {other.latency:8.3f}"


def main() -> None:
    """Print the table."""
    asked = arguments(
        __doc__, names=["all"], device="cpu", preset="small", limit=1.1, plans=[1.05, 1.1, 1.15], rounds=8
    ).parse_args()
    print(f"{'':14} {'without fission':>18}  {'with fission':>18}")
    print(f"{'model':14} {'peak':>9} {'latency':>8}  {'peak':>9} {'latency':>8} {'gain':>8}  in parts")
    for name in resolve(asked.names):
        case = Case(name, "magis", asked.device, asked.preset, latency_ratio=asked.limit)
        subject = Bench().subject(case)
        if subject.simulated_only:
            one, other = plans(subject, asked.limit)
            pairs = [(simulated(subject, one), simulated(subject, other))]
        else:
            pairs = []
            for ratio in asked.plans:
                one, other = plans(subject, ratio)
                pairs.append((measured(subject, one, asked.rounds), measured(subject, other, asked.rounds)))
        for text in line(name, pairs, asked.limit):
            print(text, flush=True)


if __name__ == "__main__":
    main()
