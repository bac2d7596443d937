"""How far plans may be from the best: `python benchmarks/gap.py`, for the paper's 28 cells.

    python benchmarks/gap.py [name ...] [--device sim:rtx3090 ...] [--latency 1.1 1.05] [--memory 0.8 0.4]
        [--budget 30000] [--output FILE]

Per network, device and limit: what a case of the gate plans (peak as a share of eager's, latency beyond eager's), the
lower bound of latency that the plan comes with (within the memory limit, or within the plan's peak), and the share of
the overhead that lies between. Nothing lies between where the overhead is below a thousandth of the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from lib.paper_figures import PAPER_LATENCY
from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import magis
from magis.planner.bench import Bench
from magis.results import Case

HEAD = f"{'network':14} {'device':12} {'limit':>8} {'peak':>6} {'overhead':>8} {'at least':>8} {'open':>5}"
FREE = 1e-3


def rows(cases: list[Case], found: list[float]) -> Iterator[str]:
    """The lines of cases of one network; the shares that are open are noted."""
    bench = Bench()
    for case in cases:
        result = magis.run_case(case, cache=bench)
        limit = f"lat {case.latency_ratio:g}" if case.memory_ratio is None else f"mem {case.memory_ratio:g}"
        line = f"{case.model:14} {case.device:12} {limit:>8} {result.memory_ratio:6.3f}"
        bound = result.latency_ratio_bound
        if bound is None:
            yield f"{line} {'missed':>8}"
            continue
        over, least = result.latency_ratio - 1, bound - 1
        found.append((over - least) / over if over >= FREE else 0.0)
        yield f"{line} {over:+8.4f} {least:+8.4f} {found[-1]:5.0%}"


def main() -> None:
    """Print the table, and write it."""
    networks = [f"seed-{name}" for name in PAPER_LATENCY["1.1"]]
    parser = arguments(
        __doc__,
        names=networks,
        device=["sim:rtx3090"],
        latency=[1.1, 1.05],
        memory=[0.8, 0.4],
        budget=int,
        output=Path,
    )
    asked = parser.parse_args()
    limits = [{"latency_ratio": each} for each in asked.latency] + [{"memory_ratio": each} for each in asked.memory]
    found: list[float] = []
    each_network = (
        rows([replace(Case(name, "magis", device, "paper", budget=asked.budget), **limit) for limit in limits], found)
        for device in asked.device
        for name in asked.names
    )
    last = (f"median of what is open: {statistics.median(found):.0%} of {len(found)} cells" for _ in range(1))
    printed(chain(head(), (HEAD,), chain.from_iterable(each_network), last), asked.output)


if __name__ == "__main__":
    main()
