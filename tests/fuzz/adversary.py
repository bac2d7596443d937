"""Plans that no search would choose: a legal order, recomputation and swaps drawn at random, for a step's own file.

A step is saved, its plan replaced by another one of the same graph, and taken up again (`magis.optimize(plan=...)`), so
that every tensor of a random program is at times recomputed or swapped, however small the step is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from magis.frontends.plan_files import read_plan, write_plan
from magis.graph import Graph, Op, Value, verify
from magis.rewrite.functionalize import functionalize
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import Evaluator
from tests.simulate.plans import adversarial_order, random_order
from tests.strategies import random_flags

__all__ = ["write_adversarial_plan"]

ANY = {"memory_limit": 2**30}
"""A limit that every plan keeps."""


class _MadeUp:
    """Costs that make swaps and recomputations take as long as each other."""

    rounding = 1
    link_bytes_per_s = 4e8
    copy_ns = 0

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        return 1000 + sum(values[value].nbytes for value in op.made())

    def workspace(self, _op: Op, _values: Mapping[int, Value]) -> int:
        return 0


def write_adversarial_plan(path: Path, graph: Graph, seed: int) -> tuple[int, int]:
    """Put another plan of a captured step in place of the one in a file; how many operators it recomputes and storages
    it swaps."""
    compiled = compile_problem(functionalize(graph), _MadeUp())
    problem = compiled.problem
    rng = np.random.default_rng(seed)
    orders = (
        lambda: np.arange(problem.n_nodes, dtype=np.int32),
        lambda: random_order(problem, rng),
        lambda: adversarial_order(problem, rng),
    )
    evaluator = Evaluator(problem, orders[seed % 3]())
    judged = evaluator.evaluate(random_flags(problem, rng))
    planned = realize(compiled, evaluator.events())
    verify(planned)
    write_plan(path, replace(read_plan(path), graph=planned, limit=ANY))  # with the checksum of its own
    return int(judged.redos), int(judged.swaps)
