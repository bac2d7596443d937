"""The published search (magis.search.published) beside the figures of the paper, on simulated devices.

    python benchmarks/published.py [name or glob ...] [--latency 1.1 1.05] [--memory 0.8 0.4] [--states 3000]
        [--most 100] [--program-order] [--preset paper] [--device sim:rtx3090] [--output FILE] [--note FILE]
    python benchmarks/published.py [name or glob ...] --split [--preset paper] [--device sim:rtx3090]

A row per model and limit: what the paper reached, what our implementation of its search reaches, and the difference.
Peak ratios are to eager's simulated peak, latencies to eager's simulated latency. The budget is a number of simulated
states; the seconds depend on the machine. The text of --note is put below the table. With --split there is no search:
the largest candidate of each model's F-Tree alone, in 2, 4, ... parts. With --program-order a state with new loops
starts from program order: the search without incremental scheduling.
"""

from __future__ import annotations

import argparse
import datetime as dt
import platform
import time
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from pathlib import Path

from paper_figures import PAPER_LATENCY, PAPER_MEMORY

import magis
from magis.api.bench import Bench
from magis.api.subject import Subject
from magis.fission.apply import Refusal, apply
from magis.fission.ftree import Analysis
from magis.ir import Graph
from magis.models import PRESETS, resolve
from magis.results import Case
from magis.rewrite.untangle import untangle
from magis.search.frames import frame, judge, look
from magis.search.judge import Goal
from magis.search.published import STATES, Published, published

CLOSE = 0.08
SPLITS = (2, 4, 8, 16, 32)
HEAD = (
    f"{'model':14} {'limit':>9} {'paper':>6} {'ours':>6} {'diff':>6} {'peak':>6} {'latency':>7} {'start':>6}"
    f" {'states':>6} {'made':>7} {'popped':>6} {'secs':>6}  loops (operators / parts)"
)


@dataclass(frozen=True)
class Row:
    """One search."""

    model: str
    limit: str
    memory: bool
    found: Published
    peak: float
    latency: float
    start: float
    met: bool
    seconds: float

    @property
    def paper(self) -> float | None:
        table = PAPER_MEMORY if self.memory else PAPER_LATENCY
        return table.get(self.limit, {}).get(self.model.removeprefix("seed-"))

    @property
    def ours(self) -> float:
        """In the unit of the paper's column: latency overhead under a memory limit, else peak ratio."""
        return self.latency - 1 if self.memory else self.peak

    def text(self) -> str:
        paper, limit = self.paper, ("mem " if self.memory else "lat ") + self.limit
        known = f"{paper:6.3f}" if paper is not None else f"{'-':>6}"
        diff = f"{self.ours - paper:+6.3f}" if paper is not None and self.met else f"{'-':>6}"
        ours = f"{self.ours:6.3f}" if self.met else "missed"
        found = self.found
        loops = ", ".join(f"{len(node.positions)} / {node.parts}" for node in found.loops) or "none"
        return (
            f"{self.model:14} {limit:>9} {known} {ours} {diff} {self.peak:6.3f} {self.latency:7.3f} {self.start:6.3f}"
            f" {found.states:6} {found.generated:7} {found.expanded:6} {self.seconds:6.0f}  {loops}"
        )


def searched(
    subject: Subject, graph: Graph, limit: str, states: int, most: int | None, *, memory: bool, incremental: bool
) -> Row:
    """One cell of the table."""
    original_ns = subject.latency_ns(subject.captured.graph)
    original = subject.original.peak_bytes
    ratio = Fraction(limit)
    goal = Goal(memory_limit=int(ratio * original)) if memory else Goal(latency_limit_ns=int(ratio * original_ns))
    started = time.perf_counter()
    reuse = subject.source.reuse
    found = published(graph, subject.roofline, goal, reuse=reuse, states=states, most=most, incremental=incremental)
    return Row(
        model=subject.source.name,
        limit=limit,
        memory=memory,
        found=found,
        peak=found.figures.peak / original,
        latency=found.figures.latency_ns / original_ns,
        start=found.start.peak / original,
        met=goal.met(found.figures.peak, found.figures.latency_ns),
        seconds=time.perf_counter() - started,
    )


def split_alone(subject: Subject, graph: Graph) -> str:
    """Peak and latency ratio with the largest candidate as the only loop, for several numbers of parts."""
    original, original_ns = subject.original.peak_bytes, subject.latency_ns(subject.captured.graph)
    costs, reuse = subject.roofline, subject.source.reuse
    tree = Analysis(graph).tree(look(frame(graph, graph, costs, reuse=reuse), {}).hot)
    if not tree.nodes:
        return f"{subject.source.name:14} no candidate"
    cells = []
    for parts in (n for n in SPLITS if tree.nodes[0].extent % n == 0):
        looped = apply(graph, tree.with_parts({0: parts}))
        if isinstance(looped, Refusal):
            cells.append(f"n={parts}: refused")
            continue
        found = judge(frame(looped, graph, costs, reuse=reuse), {})
        cells.append(f"n={parts}: {found.peak / original:.3f} at {found.latency_ns / original_ns:.3f}")
    persistent = graph.persistent_bytes() / original
    size = f"{len(tree.nodes[0].positions)} of {len(graph.ops)} operators"
    return f"{subject.source.name:14} persistent {persistent:.3f}, {size}: {', '.join(cells)}"


def summary(rows: list[Row]) -> list[str]:
    """How many are close to the paper, per limit; and what that counts."""
    lines = []
    for memory, limit in dict.fromkeys((row.memory, row.limit) for row in rows):
        column = [row for row in rows if (row.memory, row.limit) == (memory, limit) and row.paper is not None]
        near = [row for row in column if row.met and abs(row.ours - (row.paper or 0.0)) <= CLOSE]
        better = [row for row in column if row.met and row.ours <= (row.paper or 0.0)]
        name = f"{'memory' if memory else 'latency'} limit {limit}"
        lines.append(f"{name}: {len(near)} of {len(column)} within {CLOSE} of the paper, {len(better)} at or below it")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["seed"])
    parser.add_argument("--latency", nargs="*", default=["1.1", "1.05"])
    parser.add_argument("--memory", nargs="*", default=["0.8", "0.4"])
    parser.add_argument("--states", type=int, default=STATES)
    parser.add_argument("--most", type=int, help="tensors tried per expanded state; all hot-spots if left out")
    parser.add_argument("--program-order", action="store_true", help="no incremental scheduling of new loops")
    parser.add_argument("--preset", default="paper", choices=PRESETS)
    parser.add_argument("--device", default="sim:rtx3090")
    parser.add_argument("--split", action="store_true", help="no search: the largest candidate alone")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--note", type=Path)
    arguments = parser.parse_args()
    if arguments.split:
        for name in resolve(arguments.names):
            subject = Bench().subject(Case(name, "magis", arguments.device, arguments.preset))
            print(split_alone(subject, untangle(subject.normal)), flush=True)
        return
    versions = f"magis {magis.__version__}, torch {metadata.version('torch')}, numpy {metadata.version('numpy')}"
    head = [
        f"# {dt.datetime.now(tz=dt.UTC).date()}, {versions}, Python {platform.python_version()}",
        f"# python benchmarks/published.py, device {arguments.device}, {arguments.preset}, {arguments.states} states",
        f"# tensors tried per expanded state: {'all hot-spots' if arguments.most is None else arguments.most}",
        f"# new loops: {'in program order' if arguments.program_order else 'scheduled incrementally'}",
        "# paper, ours: peak ratio at a latency limit, latency overhead at a memory limit; start: peak ratio of the",
        "# step as it is; made: children generated; popped: states expanded",
        HEAD,
    ]
    print("\n".join(head), flush=True)
    rows: list[Row] = []
    wanted = [(limit, False) for limit in arguments.latency] + [(limit, True) for limit in arguments.memory]
    subjects: dict[str, tuple[Subject, Graph]] = {}
    for limit, memory in wanted:  # one column after another: the first is of use by itself
        for name in resolve(arguments.names):
            if name not in subjects:
                subject = Bench().subject(Case(name, "magis", arguments.device, arguments.preset))
                subjects[name] = subject, untangle(subject.normal)
            subject, graph = subjects[name]
            row = searched(
                subject, graph, limit, arguments.states, arguments.most,
                memory=memory, incremental=not arguments.program_order,
            )  # fmt: skip
            rows.append(row)
            print(rows[-1].text(), flush=True)
            if arguments.output is not None:
                note = [arguments.note.read_text(encoding="utf-8")] if arguments.note is not None else []
                text = [*head, *(row.text() for row in rows), "", *summary(rows), "", *note]
                arguments.output.write_text("\n".join(text), encoding="utf-8")
    print("\n".join(["", *summary(rows)]))


if __name__ == "__main__":
    main()
