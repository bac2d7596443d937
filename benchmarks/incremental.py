"""Incremental against full scheduling on random cell networks (paper, Algorithm 2 and section 7.3).

    python benchmarks/incremental.py [--networks 25] [--rewrites 4] [--seed 0] [--most 2048] [--forward] [--output FILE]

Every network is a stack of random cells, trained for one step, captured on fake tensors. Its order comes from full
scheduling. A random legal rewrite (a fission loop or a recomputation spelled out, at the peak, or a rule of
``rewrite.rules`` anywhere) makes it another step, which is scheduled twice: in full, and incrementally from the old
order. The next rewrite starts from what was found incrementally, as in a search. Both
judge what they find with the evaluator, whose arrays are made before, since every search needs them. *spliced*: the old
order with the new nodes as early as they may run, nothing ordered anew. Peaks are MiB with everything included; nothing
is recomputed or swapped beyond what the rewrite spelled out.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.capture.workload import Workload
from magis.errors import VerifyError
from magis.extensions.paper.incremental_schedule import full_order, rescheduled, survivors
from magis.extensions.paper.interim_rules import RULES
from magis.extensions.paper.stretches import MOST
from magis.fission.candidates import most_parts, regions_around
from magis.fission.expand import expand as expand_region
from magis.fission.region import Region
from magis.graph import Graph, verify
from magis.ops.optimizers import OptimizerSpec
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.rewrite.realize import realize
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.rule_table import Match, attempt
from magis.search.moves import hot
from magis.simulate.arrays import make_step
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.evaluator import Evaluator, check_order, expand
from magis.simulate.problem import FIRST, KEEP, RECOMPUTE, REDO, Int32s, Int64s, Problem

MIB = 2**20
DEVICE = "sim:rtx3090"
CLOSE = 0.01
NEAR = 5
"""Nodes before and behind the peak at which loops are tried."""
PUBLISHED = "# paper: 10 times faster on average (4 to 30), equally good in 94 of 100 cases"
HEAD = (
    f"{'net':>3} {'kind':9} {'nodes':>5} {'new':>4} {'program':>8} {'spliced':>8} {'full':>8} {'increm.':>8}"
    f" {'full s':>7} {'incr. s':>7} {'faster':>6}"
)


def sums(kinds: list[str], channels: int) -> nn.ModuleList:
    """One operation per kind, [batch, c, h, w] -> the same shape."""
    found = nn.ModuleList()
    for kind in kinds:
        conv: list[nn.Module] = []
        if kind == "sep":
            conv = [nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)]
        if kind in ("sep", "conv1"):
            conv.append(nn.Conv2d(channels, channels, 1, bias=False))
        if kind == "conv3":
            conv = [nn.Conv2d(channels, channels, 3, padding=1, bias=False)]
        if conv:
            found.append(nn.Sequential(*conv, nn.BatchNorm2d(channels), nn.ReLU()))
        else:
            found.append({"avg": nn.AvgPool2d(3, 1, 1), "max": nn.MaxPool2d(3, 1, 1), "skip": nn.Identity()}[kind])
    return found


class Cell(nn.Module):
    """A random DAG: every node is the sum of operations on one or two earlier tensors; loose ends are concatenated."""

    def __init__(self, rng: random.Random, inputs: tuple[int, ...], channels: int, *, halve: bool) -> None:
        super().__init__()
        self.enter = nn.ModuleList(nn.Conv2d(each, channels, 1, bias=False) for each in inputs)
        self.halve = halve
        self.edges: list[list[int]] = []
        kinds = []
        for node in range(len(inputs), len(inputs) + rng.randint(5, 9)):
            self.edges.append(rng.sample(range(node), min(node, rng.choice((1, 2, 2)))))
            kinds += rng.choices(("conv3", "conv1", "sep", "avg", "max", "skip"), (3, 3, 3, 1, 1, 1), k=2)
        self.kinds = sums(kinds, channels)
        used = {other for edges in self.edges for other in edges}
        self.loose = [node for node in range(len(inputs), len(inputs) + len(self.edges)) if node not in used]
        self.outputs = channels * len(self.loose)

    def forward(self, *inputs: Tensor) -> Tensor:
        tensors = [enter(x) for enter, x in zip(self.enter, inputs, strict=True)]
        smallest = min(x.shape[-1] for x in tensors)
        tensors = [F.avg_pool2d(x, x.shape[-1] // smallest) if x.shape[-1] > smallest else x for x in tensors]
        for node, edges in enumerate(self.edges):
            made = [self.kinds[2 * node + which](tensors[other]) for which, other in enumerate(edges)]
            tensors.append(made[0] if len(made) == 1 else made[0] + made[1])
        out = torch.cat([tensors[node] for node in self.loose], dim=1) if len(self.loose) > 1 else tensors[-1]
        return F.avg_pool2d(out, 2) if self.halve else out


class Network(nn.Module):
    """A stem, 6 to 20 cells that take one (randomly wired) or two (NASNet) predecessors, a classifier."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        channels, cells = rng.choice((16, 24, 32)), rng.randint(6, 20)
        self.reach = rng.choice((1, 2))
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        widths = [channels]
        self.cells = nn.ModuleList()
        for number in range(cells):
            halve = number in (cells // 3, 2 * cells // 3)
            self.cells.append(Cell(rng, tuple(widths[-self.reach :]), channels, halve=halve))
            widths.append(self.cells[-1].outputs)
            channels *= 2 if halve else 1
        self.classes = nn.Linear(widths[-1], 100)

    def forward(self, x: Tensor) -> Tensor:
        tensors = [self.stem(x)]
        for cell in self.cells:
            tensors.append(cell(*tensors[-self.reach :]))
        out: Tensor = self.classes(tensors[-1].mean((2, 3)))
        return out


def network(seed: int, *, forward: bool) -> Subject:
    """A step of a random network, or its forward pass alone, at batch 64, 32 x 32 pixels."""

    def make(_: int) -> Workload:
        rng = random.Random(seed)
        batch, targets = torch.randn(64, 3, 32, 32), torch.zeros(64, dtype=torch.int64)
        rule = OptimizerSpec("none") if forward else OptimizerSpec("sgd", lr=1e-3)
        return Workload("cells", Network(rng).train(), (batch,), (targets,), F.cross_entropy, rule)

    return Subject(Source("cells", make, "float32", DEVICE, 0))


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A step after a rewrite; where each of its nodes stood in the old order, -1 for new ones."""

    compiled: Compiled
    rank: Int64s


Rewrite = Callable[[random.Random, Subject, Compiled, Int32s], Rewritten | None]


def looped(rng: random.Random, subject: Subject, old: Compiled, order: Int32s) -> Rewritten | None:
    """A random region around one of the operators at the peak, in 2, 4 or 8 parts."""
    graph = old.graph
    judge = Evaluator(old.problem, order)
    judge.quick(np.full(old.problem.n_storages, KEEP, dtype=np.int8))
    near = order[max(0, judge.peak_run - NEAR) : judge.peak_run + NEAR + 1].tolist()
    firsts = [old.nodes[node][0] for node in near]
    plain = [op for op in firsts if op.body is None and not op.random]
    if not plain:
        return None
    at = graph.ops.index(rng.choice(plain))
    found = regions_around(graph, at, most=8)
    rng.shuffle(found)
    for cuts in found:
        parts = rng.choice((2, 4, 8))
        if most_parts(cuts) % parts == 0:
            try:
                return _compiled(subject, expand_region(graph, Region(cuts, parts)), old, order)
            except VerifyError:
                continue
    return None


def ruled(rng: random.Random, subject: Subject, old: Compiled, order: Int32s) -> Rewritten | None:
    """A random rule at a random place."""
    index = Index(old.graph)
    for rule in rng.sample(RULES, len(RULES)):
        bounds = list(rule.occurrences(index))
        for bound in rng.sample(bounds, min(4, len(bounds))):
            made = attempt(old.graph, Match(rule, bound))
            if made is not None:
                return _compiled(subject, made, old, order)
    return None


def repeated(rng: random.Random, subject: Subject, old: Compiled, order: Int32s) -> Rewritten | None:
    """A tensor in memory at the peak is made again, right before it is needed after its longest gap."""
    plain = compile_problem(old.graph, subject.roofline, reuse=False)  # taking over is for the new step to decide
    problem = plain.problem
    program = np.arange(problem.n_nodes, dtype=np.int32)
    judge = Evaluator(problem, order)
    judge.quick(np.full(problem.n_storages, KEEP, dtype=np.int8))
    storages = np.flatnonzero(hot(judge)).tolist()
    rng.shuffle(storages)
    for storage in storages:
        flags = np.full(problem.n_storages, KEEP, dtype=np.int8)
        flags[storage] = RECOMPUTE
        events = expand(problem, program, flags)
        if REDO not in events.kind:
            continue
        new = compile_problem(realize(plain, events), subject.roofline)
        place = {node: at for at, node in enumerate(order.tolist())}
        ran = [(kind, node) for kind, node in zip(events.kind, events.arg, strict=True) if kind in (FIRST, REDO)]
        if len(ran) != new.problem.n_nodes:
            return None
        rank = [place[int(node)] if kind == FIRST else -1 for kind, node in ran]
        return Rewritten(new, np.array(rank, dtype=np.int64))
    return None


def _compiled(subject: Subject, graph: Graph, old: Compiled, order: Int32s) -> Rewritten:
    verify(graph)
    new = compile_problem(graph, subject.roofline)
    return Rewritten(new, survivors(old, order, new))


@dataclass(frozen=True)
class Row:
    """One case: bytes and seconds."""

    net: int
    kind: str
    nodes: int
    new: int
    program: int
    spliced: int
    full: int
    incremental: int
    full_s: float
    incremental_s: float

    @property
    def faster(self) -> float:
        return self.full_s / self.incremental_s

    def text(self) -> str:
        peaks = " ".join(f"{b / MIB:8.2f}" for b in (self.program, self.spliced, self.full, self.incremental))
        seconds = f"{self.full_s:7.3f} {self.incremental_s:7.4f} {self.faster:6.1f}"
        return f"{self.net:3} {self.kind:9} {self.nodes:5} {self.new:4} {peaks} {seconds}"


def peak(problem: Problem, order: Int32s) -> int:
    check_order(problem, order)
    return Evaluator(problem, order).quick(np.full(problem.n_storages, KEEP, dtype=np.int8))[0]


def timed(net: int, kind: str, case: Rewritten, most: int) -> tuple[Row, Int32s]:
    """The row, and the order found incrementally."""
    problem = case.compiled.problem
    step = make_step(problem)
    start = time.perf_counter()
    full = full_order(problem, step=step, most=most)
    between = time.perf_counter()
    spliced, incremental = rescheduled(problem, case.rank, step=step, most=most)
    end = time.perf_counter()
    program = np.arange(problem.n_nodes, dtype=np.int32)
    peaks = [peak(problem, order) for order in (program, spliced, full, incremental)]
    new = int(np.count_nonzero(case.rank < 0))
    return Row(net, kind, problem.n_nodes, new, *peaks, between - start, end - between), incremental


def cases(networks: int, rewrites: int, seed: int, most: int, *, forward: bool) -> Iterator[Row]:
    kinds: list[tuple[str, Rewrite]] = [("loop", looped), ("recompute", repeated), ("rule", ruled)]
    for net in range(networks):
        rng = random.Random(1000 * seed + net)
        subject = network(1000 * seed + net, forward=forward)
        old = compile_problem(subject.untangled, subject.roofline)
        order = full_order(old.problem, most=most)
        if net == 0:
            rescheduled(old.problem, np.argsort(order), most=most)  # compiles what is to be timed
        made = 0
        while made < rewrites:
            kind, rewrite = rng.choice(kinds)
            case = rewrite(rng, subject, old, order)
            if case is not None:
                made += 1
                row, order = timed(net, kind, case, most)
                old = case.compiled
                yield row


def summary(rows: list[Row]) -> list[str]:
    speeds = [row.faster for row in rows]
    equal = sum(row.incremental <= row.full for row in rows)
    better = sum(row.incremental < row.full for row in rows)
    close = sum(row.incremental <= (1 + CLOSE) * row.full for row in rows)
    spliced = sum(row.spliced <= row.full for row in rows)
    worst = max(row.incremental / row.full for row in rows)
    helps = sum(row.incremental < row.spliced for row in rows)
    lean = statistics.mean(row.full / row.program for row in rows)
    seconds = f"{sum(r.full_s for r in rows):.1f} s in full, {sum(r.incremental_s for r in rows):.1f} s incrementally"
    mean, median = statistics.mean(speeds), statistics.median(speeds)
    good = f"incremental as good as full in {equal} of {len(rows)} cases (better in {better})"
    return [
        f"faster: {mean:.1f} times on average, {median:.1f} median, {min(speeds):.1f} to {max(speeds):.1f}; {seconds}",
        f"peak: {good}, within {CLOSE:.0%} in {close}; at worst {worst:.4f} of it",
        f"spliced alone as good as full in {spliced}; the interval ordered anew lowers it in {helps}",
        f"full scheduling: {lean:.4f} of program order's peak on average",
    ]


def table(found: Iterable[Row]) -> Iterator[str]:
    """A line of every case, and what they come to."""
    rows = []
    for row in found:
        rows.append(row)
        yield row.text()
    yield ""
    yield from summary(rows)


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, networks=25, rewrites=4, seed=0, most=MOST, output=Path)
    parser.add_argument("--forward", action="store_true", help="the forward pass alone")
    asked = parser.parse_args()
    found = cases(asked.networks, asked.rewrites, asked.seed, asked.most, forward=asked.forward)
    printed(chain(head(DEVICE), (PUBLISHED, HEAD), table(found)), asked.output)


if __name__ == "__main__":
    main()
