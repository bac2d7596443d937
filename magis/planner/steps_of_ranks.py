"""The latency of a rank's step as it was captured, whose messages run beside its operators."""

from __future__ import annotations

import numpy as np

from magis.graph import BESIDE, Graph
from magis.simulate.compiled_problem import Costs, compile_problem
from magis.simulate.evaluator import evaluate
from magis.simulate.problem import KEEP


def sends(graph: Graph) -> bool:
    """Return True if there are messages that can run beside the operators."""
    return any(op.target in BESIDE for op in graph.ops)


def in_order_ns(graph: Graph, costs: Costs) -> int:
    """Return the nanoseconds of a step in program order that recomputes nothing. Each message is sent ahead of its
    first reader, where that is possible, and not before that of the one before it, as `fully_shard` does."""
    problem = compile_problem(graph, costs).problem
    order, flags = np.arange(problem.n_nodes, dtype=np.int32), np.full(problem.n_storages, KEEP, dtype=np.int8)
    return evaluate(problem, order, flags).latency_ns
