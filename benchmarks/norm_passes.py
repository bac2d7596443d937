"""What batch norms in two passes could gain: plans in which tensors cost nothing where they could be in parts.

    python benchmarks/norm_passes.py [name ...] [--device sim:rtx3090] [--preset paper] [--latency 1.05 1.1]
                                     [--memory 0.4 0.3 0.25 0.22] [--output FILE]

With a norm in two passes (sums over the parts, then each part normalized), a loop along the batch goes on from the
statistics of one norm to those of the next, and only the norms' inputs exist whole. Here, without any loop, tensors
inside of such stretches take no bytes while a call that makes or reads them runs, and loops take no time: real
ones gain less. Rows:

    as it is               no loops
    up to norms            concatenations, resized images and the gradients by them are in parts: no norm is crossed
    through norms          so are results of norms, activations, sums, poolings, and all gradients of images
    everything             no tensor takes bytes at the calls that make or read it, as if norms' inputs were made again
    ..., norms given sums  a norm that is recomputed has its statistics: two passes over its image instead of three

A line has the lowest peak within each latency limit, and the lowest latency within each memory limit, as shares of
eager's (front and search together), and below it lower bounds of the same for all orders, swaps and recomputations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from magis.planner.bench import Bench
from magis.results import Case
from magis.search.budgeted_evaluator import JudgedPlan, Objective
from magis.search.driver import search
from magis.search.latency_bound import latency_lower_bound
from magis.search.pareto_sweep import sweep
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.problem import Problem
from magis.units import MIB

BUDGET = 12_000
HALVINGS = 7
NORM = "native_batch_norm"
JOINED = {"cat", "upsample_bilinear2d", "upsample_nearest2d"}
WINDOWS = {*JOINED, "max_pool2d_with_indices"}
BETWEEN = {NORM, "relu", "relu_", "threshold_backward", "add", "add_", "max_pool2d_with_indices"}
"""Operators whose first results lie between two norms."""


@dataclass(frozen=True)
class Step:
    """A step without loops, and what eager needs for it."""

    compiled: Compiled
    nbytes: int
    ns: int

    def name(self, node: int) -> str:
        return self.compiled.nodes[node][0].target.split(".")[1]

    def stretches(self) -> tuple[frozenset[int], ...]:
        """Large temporary storages that loops up to norms, and through them, could have in parts; all of them."""
        problem = self.compiled.problem
        large = {s for s in range(problem.n_storages) if problem.nbytes[s] >= MIB}
        short, through = set[int](), set[int]()
        for storage in large:
            maker = int(problem.producer[storage])
            makers = {self.name(int(problem.producer[taken])) for taken in problem.inputs(maker)}
            if self.name(maker) in JOINED:
                short.add(storage)
            elif self.name(maker) in BETWEEN:
                through.add(storage)
            elif self.name(maker) == "convolution_backward" and storage == problem.outputs(maker)[0]:
                (through if makers.isdisjoint(WINDOWS) else short).add(storage)
        return frozenset(short), frozenset(short | through), frozenset(large)

    def in_parts(self, small: frozenset[int], *, given: bool = False) -> Problem:
        """The problem in which the storages ``small`` take no bytes at the nodes that make or read them; with
        ``given``, recomputed norms read their image once."""
        problem = self.compiled.problem
        less, again = np.zeros_like(problem.node_ws), problem.redo_ns.copy()
        for node in range(problem.n_nodes):
            taken = [s for s in problem.inputs(node).tolist() if s in small]
            made = [s for s in problem.outputs(node).tolist() if s in small]
            if small.intersection(problem.reuses(node).tolist()):
                made = []  # it lies where an input does, which is counted
            less[node] = problem.nbytes[[*taken, *made]].sum()
            again[node] = again[node] * 2 // 3 if given and self.name(node) == NORM else again[node]
        figures = {name: getattr(problem, name) - less for name in ("node_ws", "node_tensor", "redo_ws", "redo_tensor")}
        return replace(problem, redo_ns=again, **figures)

    def peak(self, problem: Problem, front: Sequence[JudgedPlan], latency: float) -> str:
        """The lowest peak found within a latency limit."""
        limit = int(latency * self.ns)
        found = [search(problem, Objective(latency_limit_ns=limit), budget=BUDGET), *front]
        return f"{min(each.peak for each in found if each.latency_ns <= limit) / self.nbytes:8.4f}"

    def latency(self, problem: Problem, front: Sequence[JudgedPlan], memory: float) -> str:
        """The lowest latency found within a memory limit."""
        limit = int(memory * self.nbytes)
        found = [search(problem, Objective(memory_limit=limit), budget=BUDGET), *front]
        within = [each.latency_ns for each in found if each.peak <= limit]
        return f"{min(within) / self.ns:8.4f}" if within else f"{'missed':>8}"

    def least_peak(self, problem: Problem, latency: float) -> str:
        """A peak below which no plan keeps a latency limit."""
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            kept = latency_lower_bound(problem, int(middle * self.nbytes)) <= latency * self.ns
            low, high = (low, middle) if kept else (middle, high)
        return f"{low:8.4f}"

    def least_latency(self, problem: Problem, memory: float) -> str:
        return f"{latency_lower_bound(problem, int(memory * self.nbytes)) / self.ns:8.4f}"


def rows(name: str, device: str, preset: str, latency: list[float], memory: list[float]) -> Iterator[str]:
    """The lines of one network."""
    subject = Bench().subject(Case(name, "magis", device, preset))
    compiled = compile_problem(subject.normal, subject.roofline)
    step = Step(compiled, subject.original.peak_bytes, subject.original_ns)
    limits = [*(f"lat {each:g}" for each in latency), *(f"mem {each:g}" for each in memory)]
    yield f"{name:34} {' '.join(f'{each:>8}' for each in limits)}"
    names = ("as it is", "up to norms", "through norms", "everything")
    kinds = list(zip(names, (frozenset[int](), *step.stretches()), strict=True))
    tried = [(text, step.in_parts(small)) for text, small in kinds]
    tried += [(f"{text}, norms given sums", step.in_parts(small, given=True)) for text, small in kinds]
    for text, problem in tried:
        front = sweep(problem).points
        found = (
            *map(partial(step.peak, problem, front), latency),
            *map(partial(step.latency, problem, front), memory),
        )
        yield f"  {text:32} {' '.join(found)}"
        least = (*map(partial(step.least_peak, problem), latency), *map(partial(step.least_latency, problem), memory))
        yield f"  {'  at least':32} {' '.join(least)}"


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(
        __doc__,
        names=["unetpp", "resnet50"],
        device="sim:rtx3090",
        preset="paper",
        latency=[1.05, 1.1],
        memory=[0.4, 0.3, 0.25, 0.22],
        output=Path,
    )
    asked = parser.parse_args()
    each = (rows(name, asked.device, asked.preset, asked.latency, asked.memory) for name in asked.names)
    printed(chain(head(), chain.from_iterable(each)), asked.output)


if __name__ == "__main__":
    main()
