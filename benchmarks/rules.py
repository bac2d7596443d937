"""TASO rules on the paper's networks: where each applies, and what all aggregations together do.

    python benchmarks/rules.py [name or glob ...] [--device sim:rtx3090] [--preset small]

First table: number of places at which a rule applies, tried out, by network. Of a family of calls that can be merged,
all of it and every two neighbours count. Second table: operators besides views and weight updates, simulated peak (in
program order, nothing recomputed), the lowest peak that an order alone reaches without recomputation ("updates early":
each weight as soon as its gradient exists), and simulated latency, before and after applying all aggregations greedily.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from lib.program import arguments

from magis.quiet import before_torch

before_torch()

from magis.extensions.paper.interim_rules import RULES, counted
from magis.graph import Graph, verify
from magis.graph.hazards import is_pure_view
from magis.models import resolve
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case
from magis.rewrite.rules.rule_table import aggregated
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import Evaluator

MIB = 2**20


@dataclass(frozen=True)
class Figures:
    """One step: operators, bytes, nanoseconds."""

    operators: int
    peak: int
    early: int
    latency: int


def figures(subject: Subject, graph: Graph) -> Figures:
    """What the simulator says of a graph as it stands, and with each weight updated as soon as possible."""
    verify(graph)
    compiled = compile_problem(graph, subject.costs({}))
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    early = Evaluator(compiled.problem, order).evaluate(np.zeros(compiled.problem.n_storages, dtype=np.int8))
    working = [op for op in graph.ops if op.phase != "update" and not is_pure_view(graph, op)]
    return Figures(len(working), subject.simulate_graph(graph).peak_bytes, early.peak, subject.latency_ns(graph))


def counts_table(names: Sequence[str], counts: Sequence[dict[str, int]]) -> list[str]:
    """Rules down, networks across."""
    width = max(len(each.name) for each in RULES)
    lines = [f"{'':{width}} " + " ".join(f"{name:>9}" for name in names)]
    for each in RULES:
        row = [found[each.name] for found in counts]
        lines.append(f"{each.name:{width}} " + " ".join(f"{count or '-':>9}" for count in row))
    return lines


def main() -> None:
    """Print both tables."""
    asked = arguments(__doc__, names=["all"], device="sim:rtx3090", preset="small").parse_args()
    names = list(resolve(asked.names))
    counts, rows = [], []
    for name in names:
        subject = Bench().subject(Case(name, "magis", asked.device, asked.preset))
        before = subject.untangled
        counts.append(dict(counted(before)))
        start = time.perf_counter()
        after, applied = aggregated(before)
        seconds = time.perf_counter() - start
        old, new = figures(subject, before), figures(subject, after)
        cells = [
            f"{old.operators:5} {new.operators:5}",
            f"{old.peak / MIB:8.1f} {new.peak / MIB:8.1f}",
            f"{old.early / MIB:8.1f} {new.early / MIB:8.1f}",
            f"{old.latency / 1e6:8.3f} {new.latency / 1e6:8.3f} {new.latency / old.latency - 1:+7.2%}",
            f"{seconds:5.1f}",
            ", ".join(f"{count} {rule}" for rule, count in applied.items()) or "-",
        ]
        rows.append(f"{name:9}  " + "  ".join(cells))
    print(f"{asked.device}, preset {asked.preset}\n")
    print(*counts_table(names, counts), sep="\n")
    print()
    heads = ["operators  ", "      peak, MiB  ", "early updates, MiB", "        latency, ms       ", "sec  ", "applied"]
    print(f"{'':9}  " + "  ".join(heads))
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
