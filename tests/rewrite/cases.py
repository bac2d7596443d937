"""Networks whose plans and orders are tried: judged, realized, verified, simulated, run and measured in agreement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from torch import Tensor

from magis.capture.workload import Workload
from magis.extensions.models.building import Style
from magis.extensions.models.convnets import ResNetConfig, resnet
from magis.extensions.models.encoders import BertConfig, bert
from magis.extensions.models.network_names import GATE_NAMES
from magis.graph import Graph, verify
from magis.models import get
from magis.rewrite.functionalize import functionalize
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.evaluator import Evaluator, check_order
from magis.simulate.problem import Events, Int8s, Int32s
from magis.simulate.simulator import replay
from tests.nets import NETS, Built, as_built
from tests.oracles import Costs, captured, differences, eager_step, graph_step, history, observed, workspaces
from tests.simulate.plans import adversarial_order, random_order
from tests.strategies import random_flags, reordered

STEPS = 2
SLOW_LINK = 4e8  # bytes per second: swaps of small tensors take as long as a few operators


class Case:
    """A network, its arrays, and what eager leaves behind."""

    def __init__(self, net: Built) -> None:
        self.net = net
        self.step = captured(net)
        self.graph = functionalize(self.step.graph)
        self.compiled: Compiled = compile_problem(self.graph, Costs(self.graph, link_bytes_per_s=SLOW_LINK))

    @functools.cached_property
    def eager(self) -> list[dict[str, Tensor]]:
        return history(eager_step(self.net), STEPS)

    def program_order(self) -> Int32s:
        return np.arange(self.compiled.problem.n_nodes, dtype=np.int32)

    def drawn_plan(self, seed: int) -> tuple[Int32s, Int8s]:
        """An order (the program's, a random, an adversarial one, by turns) and random flags."""
        rng = np.random.default_rng(seed)
        problem = self.compiled.problem
        orders: list[Callable[[], Int32s]] = [
            self.program_order,
            lambda: random_order(problem, rng),
            lambda: adversarial_order(problem, rng),
        ]
        return orders[seed % 3](), random_flags(problem, rng)

    def check(self, order: Int32s, flags: Int8s) -> tuple[Graph, Events]:
        """Evaluate, realize, verify, simulate, run, measure one plan; all of them must agree."""
        problem = self.compiled.problem
        check_order(problem, order)
        evaluator = Evaluator(problem, order)
        judged = evaluator.evaluate(flags)
        events = evaluator.events()
        graph = realize(self.compiled, events)
        profile = replay(graph, workspaces().of(graph))
        peak = self.compiled.nodes[int(evaluator.runs[evaluator.peak_run]) >> 1] if problem.n_nodes else ()
        # The evaluator holds the inputs of a node of several operators to its end, where some may die between them.
        first, last = (
            {self.graph.values[value].storage for op in ops for value in op.inputs()} for ops in (peak[:-1], peak[-1:])
        )
        slack = sum(self.graph.storages[storage].nbytes for storage in first - last)
        assert 0 <= judged.peak - profile.peak_bytes <= slack
        assert judged.tensor_peak == profile.tensor_bytes
        assert graph.persistent_bytes() == self.graph.persistent_bytes()
        self.check_graph(graph)
        return graph, events

    def check_schedule(self, order: Sequence[int], *, functional: bool) -> None:
        """Verify, simulate, run, measure the operators of the captured or functional graph in another order."""
        self.check_graph(reordered(self.graph if functional else self.step.graph, order))

    def check_graph(self, graph: Graph) -> None:
        """A legal graph that takes the simulated bytes and computes eager's numbers, bit for bit."""
        verify(graph)
        profile = replay(graph, workspaces().of(graph))
        found, peak, tensors = observed(graph_step(graph, self.net), graph.persistent_bytes())
        assert (peak, tensors) == (profile.peak_bytes, profile.tensor_bytes)
        assert differences(self.eager, found) == []


class Model:
    """A network of the package as a net of the tests."""

    def __init__(self, make: Callable[[], Workload]) -> None:
        self._make = make

    def build(self) -> Built:
        return as_built(self._make())


TINY_BERT = BertConfig(
    batch_size=8, seq_len=16, layers=2, width=16, heads=2, vocab_size=40, max_positions=16, dropout=0.1
)
TINY_RESNET = ResNetConfig(stages=(1, 1, 1, 1), batch_size=2, image_size=32, width=4, classes=5)
MODELS: dict[str, Model] = {
    "tiny-bert": Model(lambda: bert(TINY_BERT, Style(seed=False), "bert", 0)),
    "tiny-resnet": Model(lambda: resnet(TINY_RESNET, Style(seed=False), "resnet", 0)),
    **{name: Model(functools.partial(get(name).build, "small", 0)) for name in GATE_NAMES},
}


@functools.cache
def case_of(name: str) -> Case:
    """A network by name; it is kept for the whole test run."""
    return Case((MODELS[name] if name in MODELS else NETS[name]).build())


def batches(quick: int, size: int, total: int) -> list[object]:
    """Parameters: the first ``quick`` seeds, in every run; then, in soak runs, those up to ``total`` in pieces."""
    pieces = [range(start, min(start + size, total)) for start in range(quick, total, size)]
    soak = [pytest.param(piece, id=f"{piece[0]}-{piece[-1]}", marks=pytest.mark.soak) for piece in pieces]
    return [pytest.param(range(quick), id=f"0-{quick - 1}"), *soak]
