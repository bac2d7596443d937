"""Steps that swap, recorded on a device with streams that exists on paper."""

from __future__ import annotations

import copy
import functools

import numpy as np
from torch import Tensor

from magis.graph import Graph, Op, verify
from magis.rewrite.functionalize import functionalize
from magis.rewrite.realize import realize
from magis.runtime.steps import GraphStep
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.problem import SWAP
from tests.nets import NETS, Built
from tests.oracles import captured, history
from tests.runtime.simulated_gpu import SimulatedGpu

OPERATOR_NS = 1000


class Costs:
    """A microsecond for every operator; a link on which a swap takes a few of those."""

    rounding = 1
    link_bytes_per_s = 1e10
    copy_ns = 300

    def nanoseconds(self, op: Op, values: object) -> int:
        return OPERATOR_NS

    def workspace(self, op: Op, values: object) -> int:
        return 0


@functools.cache
def problem(name: str) -> tuple[Built, Compiled]:
    net = NETS[name].build()
    return net, compile_problem(functionalize(captured(net).graph), Costs())


def plan(name: str, flags: np.ndarray | None = None) -> Graph:
    """A step of the net with these decisions; without any, all is swapped that can be."""
    _, compiled = problem(name)
    count = compiled.problem.n_storages
    chosen = np.full(count, SWAP, dtype=np.int8) if flags is None else flags
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    graph = realize(compiled, expand(compiled.problem, order, chosen))
    verify(graph)
    return graph


def swaps(graph: Graph) -> int:
    return sum(op.target == "magis.load" for op in graph.ops)


def recorded(graph: Graph, net: Built, count: int = 2) -> tuple[SimulatedGpu, list[dict[str, Tensor]], GraphStep]:
    """So many steps on the paper device, and what they left behind."""
    gpu = SimulatedGpu()
    step = GraphStep(graph, copy.deepcopy(net.module), net.inputs, net.targets, net.rule, runtime=gpu)
    gpu.note_pinned()
    run = step.run

    def watched() -> Tensor:
        with gpu:
            return run()

    step.run = watched  # type: ignore[method-assign]
    found = history(step, count)
    return gpu, found, step
