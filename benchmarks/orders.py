"""What other orders are worth: the front of random cell networks with and without re-ordering, nothing in parts.

    python benchmarks/orders.py [--networks 8] [--output FILE]

Two rows per network (those of ``incremental.py``): its inference step and its training step. Figures: the least peak on
the front, as a share of eager's, at no more than eager's simulated time, at 5% and at 10% more; processor seconds of
the front. A training step's peak lies where the forward pass ends, with everything kept: no order changes that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from incremental import DEVICE, network

from magis.search.fission_pareto import whole_front
from magis.search.pareto_sweep import FULL

LATENCIES = (1.0, 1.05, 1.1)


def rows(networks: int) -> Iterator[str]:
    """The lines of the table, and the largest gain of either kind."""
    yield f"{'net':>3} {'step':9} {'nodes':>5}  {'program order':^27}  {'other orders too':^27}"
    heads = " ".join(f"{f'lat {each:g}':>8}" for each in LATENCIES)
    yield f"{'':19}  {heads} {'s':>5}  {heads} {'s':>5}"
    gains: dict[str, list[float]] = {"inference": [], "training": []}
    for number in range(networks):
        for kind in gains:
            subject = network(number, forward=kind == "inference")
            eager, nodes = subject.latency_ns(subject.captured.graph), len(subject.normal.ops)  # nothing of it is timed
            figures = []
            cells = ""
            for reorder in (False, True):
                started = time.process_time()
                effort = replace(FULL, reorder=reorder)
                front = whole_front(subject.normal, subject.roofline, reuse=subject.source.reuse, effort=effort)
                seconds = time.process_time() - started
                found = [
                    min((point.peak for point in front.points if point.latency_ns <= each * eager), default=math.inf)
                    / subject.original.peak_bytes
                    for each in LATENCIES
                ]
                figures.append(found)
                cells += "  " + " ".join(f"{each:8.4f}" for each in found) + f" {seconds:5.1f}"
            gains[kind] += [1 - after / before for before, after in zip(*figures, strict=True)]
            yield f"{number:3} {kind:9} {nodes:5}{cells}"
    yield ""
    for kind, found in gains.items():
        better = sum(gain > 0.01 for gain in found)
        yield f"{kind}: up to {100 * max(found):.1f}% leaner, more than 1% in {better} of {len(found)} cells"


def main() -> None:
    """Print the table."""
    asked = arguments(__doc__, networks=8, output=Path).parse_args()
    printed(chain(head(DEVICE), rows(asked.networks)), asked.output)


if __name__ == "__main__":
    main()
