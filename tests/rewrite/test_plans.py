"""Random plans, from the evaluator's arrays to a step that ran: the same bytes everywhere and the same numbers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from magis.ir import Graph, verify
from magis.models.bert import BertConfig, bert
from magis.models.registry import get
from magis.models.resnet import ResNetConfig, resnet
from magis.models.style import Style
from magis.models.workload import Workload
from magis.rewrite.normalize import functionalize
from magis.rewrite.realize import realize
from magis.simulate.compile import Compiled, compile_problem
from magis.simulate.evaluator import Evaluator, check_order
from magis.simulate.events import BLOCK, REDO, SWAP, Events
from magis.simulate.problem import Int8s, Int32s
from magis.simulate.replay import replay
from tests.nets import NETS, Built
from tests.oracles import Costs, captured, differences, eager_step, graph_step, history, measured, workspaces
from tests.simulate.plans import random_order
from tests.strategies import random_flags

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
    def eager(self) -> list[dict[str, object]]:
        return history(eager_step(self.net), STEPS)  # type: ignore[return-value]

    def program_order(self) -> Int32s:
        return np.arange(self.compiled.problem.n_nodes, dtype=np.int32)

    def check(self, order: Int32s, flags: Int8s) -> tuple[Graph, Events]:
        """Evaluate, realize, verify, simulate, run, measure one plan; all of them must agree."""
        problem = self.compiled.problem
        check_order(problem, order)
        evaluator = Evaluator(problem, order)
        judged = evaluator.evaluate(flags)
        events = evaluator.events()
        graph = realize(self.compiled, events)
        verify(graph)
        profile = replay(graph, workspaces().of(graph))
        peak = self.compiled.nodes[int(evaluator.runs[evaluator.peak_run]) >> 1] if problem.n_nodes else ()
        if len(peak) > 1:
            # The inputs of a node of several operators may die between them, where the evaluator holds them.
            assert 0 <= judged.peak - profile.peak_bytes <= 16
        else:
            assert judged.peak == profile.peak_bytes
        assert judged.tensor_peak == profile.tensor_bytes
        persistent = graph.persistent_bytes()
        assert persistent == self.graph.persistent_bytes()
        assert measured(graph_step(graph, self.net), persistent) == (profile.peak_bytes, profile.tensor_bytes)
        assert differences(self.eager, history(graph_step(graph, self.net), STEPS)) == []  # type: ignore[arg-type]
        return graph, events


@functools.cache
def case(name: str) -> Case:
    return Case((MODELS[name]() if name in MODELS else NETS[name]).build())


class Model:
    """A registered network as a net of the tests."""

    def __init__(self, make: Callable[[], Workload]) -> None:
        self._make = make

    def build(self) -> Built:
        work = self._make()
        return Built(work.module, work.inputs, work.targets, work.loss_fn, work.optimizer, work.explicit_attention)


TINY_BERT = BertConfig(
    batch_size=8, seq_len=16, layers=2, width=16, heads=2, vocab_size=40, max_positions=16, dropout=0.1
)
TINY_RESNET = ResNetConfig(stages=(1, 1, 1, 1), batch_size=2, image_size=32, width=4, classes=5)
MODELS: dict[str, Callable[[], Model]] = {
    "tiny-bert": lambda: Model(lambda: bert(TINY_BERT, Style(seed=False), "bert", 0)),
    "tiny-resnet": lambda: Model(lambda: resnet(TINY_RESNET, Style(seed=False), "resnet", 0)),
    "bert": lambda: Model(lambda: get("bert").build("small", 0)),
    "resnet50": lambda: Model(lambda: get("resnet50").build("small", 0)),
    "btlm": lambda: Model(lambda: get("btlm").build("small", 0)),
}
QUICK = [name for name in NETS if not name.startswith("optimizer-") or name.endswith("decay")]


@pytest.mark.parametrize("name", [*QUICK, "tiny-bert", "tiny-resnet"])
def test_a_random_plan(name: str) -> None:
    """On the program's order for every other network, else on a random one."""
    found = case(name)
    rng = np.random.default_rng(sum(name.encode()))
    problem = found.compiled.problem
    order = random_order(problem, rng) if len(name) % 2 else found.program_order()
    found.check(order, random_flags(problem, rng))


def test_the_random_plans_do_what_plans_can_do() -> None:
    """Else the test above would prove little."""
    seen: Counter[str] = Counter()
    for name in ("tiny-bert", "tiny-resnet", "batch-norm", "fan-out"):
        problem = case(name).compiled.problem
        for seed in range(4):
            rng = np.random.default_rng(seed)
            evaluator = Evaluator(problem, case(name).program_order())
            evaluator.quick(random_flags(problem, rng))
            events = evaluator.events()
            seen["redos"] += int((events.kind == REDO).sum())
            seen["random redos"] += sum(
                any(op.random for op in case(name).compiled.nodes[arg])
                for kind, arg in zip(events.kind.tolist(), events.arg.tolist(), strict=True)
                if kind == REDO
            )
            seen["swaps"] += int(evaluator.swapped().sum())
            seen["re-use"] += int((events.reuse >= 0).sum())
            seen["early blocks"] += int((events.kind[: len(events) * 3 // 4] == BLOCK).sum())
    assert min(seen.values()) > 10, seen
    assert len(seen) == 5, seen


def test_dropout_is_repeated_with_the_same_numbers() -> None:
    found = case("dropout")
    problem = found.compiled.problem
    flags = np.zeros(problem.n_storages, dtype=np.int8)
    for node, group in enumerate(found.compiled.nodes):
        if any(op.random for op in group):
            flags[problem.outputs(node)] = 1  # RECOMPUTE
    graph, _ = found.check(found.program_order(), flags)
    assert Counter(op.target for op in graph.ops)["magis.rng_enter"] == 2


def test_everything_swapped() -> None:
    found = case("tiny-bert")
    flags = np.full(found.compiled.problem.n_storages, SWAP, dtype=np.int8)
    graph, _ = found.check(found.program_order(), flags)
    targets = Counter(op.target for op in graph.ops)
    assert targets["magis.store"] == targets["magis.wait"] == targets["magis.load"] > 5


def test_everything_recomputed_without_taking_memory_over() -> None:
    found = Case(NETS["encoder-layer"].build())
    found.compiled = compile_problem(found.graph, Costs(found.graph), reuse=False)
    flags = np.ones(found.compiled.problem.n_storages, dtype=np.int8)
    graph, events = found.check(found.program_order(), flags)
    assert (events.reuse == -1).all()
    assert len(graph.ops) > len(found.graph.ops)


@pytest.mark.soak
@pytest.mark.parametrize("name", [*NETS, "tiny-bert", "tiny-resnet"])
def test_many_random_plans(name: str) -> None:
    found = case(name)
    problem = found.compiled.problem
    for seed in range(8):
        rng = np.random.default_rng(seed)
        order = random_order(problem, rng) if seed % 2 else found.program_order()
        found.check(order, random_flags(problem, rng))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["bert", "resnet50", "btlm"])
def test_random_plans_of_real_networks(name: str) -> None:
    found = case(name)
    problem = found.compiled.problem
    for seed in range(4):
        rng = np.random.default_rng(seed)
        order = random_order(problem, rng) if seed == 3 else found.program_order()
        found.check(order, random_flags(problem, rng))
