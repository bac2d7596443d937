"""Plans per second with fission beside those without: ``python benchmarks/fission_speed.py [model ...]``.

A plan of a divided step is a plan of the step around its loop and one of the loop's body: both are judged, one after
the other. Half of the tensors that may be dropped are, so that the passes have work to do. About half of the step is in
the loop.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from lib.program import arguments

from magis.fission.candidates import connected, follow
from magis.fission.expand import expand
from magis.fission.loss_suffix import batch_inputs, places, suffix
from magis.fission.region import Region
from magis.planner.bench import Bench
from magis.results import Case
from magis.search.loop_nest import LoopNest, level
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, RECOMPUTE, Int8s, Problem

ROUNDS = 5
PARTS = 4
SECONDS = 0.2


def main() -> None:
    """Print one line per model."""
    names = arguments(__doc__, names=["bert", "vit", "gpt_neo", "btlm"]).parse_args().names
    print(f"{'model':12} {'nodes':>6} {'plans/s':>9}  {'around':>6} {'in loop':>7} {'plans/s':>9} {'share':>6}")
    for name in names:
        subject = Bench().subject(Case(name, "magis", "sim:rtx3090", "paper", memory_ratio=0.5))
        graph = subject.untangled
        axis = follow(graph, batch_inputs(graph))
        regions = [connected(graph, suffix(graph, axis, at))[0] for at in places(graph, axis, 8)]
        cuts = min(regions, key=lambda each: abs(len(each) - len(graph.ops) // 2))
        divided = level(expand(graph, Region(cuts, PARTS), in_place=True), subject.roofline, reuse=True)
        whole = compile_problem(graph, subject.roofline).problem
        levels = list(problems(divided))
        before = statistics.median(1 / seconds_per_plan([whole]) for _ in range(ROUNDS))
        after = statistics.median(1 / seconds_per_plan(levels) for _ in range(ROUNDS))
        sizes = [problem.n_nodes for problem in levels]
        print(
            f"{name:12} {whole.n_nodes:6} {before:9.0f}  {sizes[0]:6} {sizes[1]:7} {after:9.0f} {after / before:6.2f}",
            flush=True,
        )


def problems(found: LoopNest) -> list[Problem]:
    """Those of every level, the outermost first."""
    return [found.compiled.problem, *(problems(found.inner) if found.inner is not None else [])]


def seconds_per_plan(levels: list[Problem]) -> float:
    """Judge one plan of every level over and over."""
    judges = [(Evaluator(p, np.arange(p.n_nodes, dtype=np.int32)), half_dropped(p)) for p in levels]
    for judge, flags in judges:
        judge.quick(flags)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        for judge, flags in judges:
            for _ in range(50):
                judge.quick(flags)
        count += 50
    return (time.perf_counter() - start) / count


def half_dropped(problem: Problem) -> Int8s:
    """Every other tensor, by lot, is made again."""
    lot = np.random.default_rng(0).random(problem.n_storages)
    flags: Int8s = np.where(lot < 0.5, RECOMPUTE, DROP).astype(np.int8)
    return flags


if __name__ == "__main__":
    main()
