"""Random plans, from the evaluator's arrays to a step that ran: the same bytes everywhere and the same numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import BLOCK, REDO, SWAP
from tests.nets import FORWARD, NETS, Block, Net, rows
from tests.oracles import Costs
from tests.rewrite.cases import Case, batches, case_of
from tests.simulate.plans import random_order
from tests.strategies import random_flags

QUICK = [name for name in NETS if not name.startswith("optimizer-") or name.endswith("decay")]


@pytest.mark.parametrize("name", [*QUICK, "tiny-bert", "tiny-resnet"])
def test_a_random_plan(name: str) -> None:
    """On the program's order for every other network, else on a random one."""
    found = case_of(name)
    rng = np.random.default_rng(sum(name.encode()))
    problem = found.compiled.problem
    order = random_order(problem, rng) if len(name) % 2 else found.program_order()
    found.check(order, random_flags(problem, rng))


def test_the_random_plans_do_what_plans_can_do() -> None:
    """Else the test above would prove little."""
    seen: Counter[str] = Counter()
    for name in ("tiny-bert", "tiny-resnet", "batch-norm", "fan-out"):
        problem = case_of(name).compiled.problem
        for seed in range(4):
            rng = np.random.default_rng(seed)
            evaluator = Evaluator(problem, case_of(name).program_order())
            evaluator.quick(random_flags(problem, rng))
            events = evaluator.events()
            seen["redos"] += int((events.kind == REDO).sum())
            seen["random redos"] += sum(
                any(op.random for op in case_of(name).compiled.nodes[arg])
                for kind, arg in zip(events.kind.tolist(), events.arg.tolist(), strict=True)
                if kind == REDO
            )
            seen["swaps"] += int(evaluator.swapped().sum())
            seen["re-use"] += int((events.reuse >= 0).sum())
            seen["early blocks"] += int((events.kind[: len(events) * 3 // 4] == BLOCK).sum())
    assert min(seen.values()) > 10, seen
    assert len(seen) == 5, seen


def test_a_step_that_only_counts_its_calls() -> None:
    """All that it does is an update; there is nothing for it to wait for."""

    def count(block: Any, x: torch.Tensor) -> torch.Tensor:
        block.calls.add_(1)
        return x

    net = Net(lambda: Block(count, calls=torch.zeros(4)), rows(3, 4), loss_fn=None, rule=FORWARD)
    found = Case(net.build())
    graph, _ = found.check(found.program_order(), np.zeros(0, dtype=np.int8))
    assert [op.target for op in graph.ops] == ["aten.add_.Tensor"]


def test_dropout_is_repeated_with_the_same_numbers() -> None:
    found = case_of("dropout")
    problem = found.compiled.problem
    flags = np.zeros(problem.n_storages, dtype=np.int8)
    for node, group in enumerate(found.compiled.nodes):
        if any(op.random for op in group):
            flags[problem.outputs(node)] = 1  # RECOMPUTE
    graph, _ = found.check(found.program_order(), flags)
    assert Counter(op.target for op in graph.ops)["magis.rng_enter"] == 2


def test_everything_swapped() -> None:
    found = case_of("tiny-bert")
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


@pytest.mark.parametrize("seeds", batches(2, 24, 50))
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-resnet"])
def test_more_random_plans(name: str, seeds: range) -> None:
    for seed in seeds:
        case_of(name).check(*case_of(name).drawn_plan(seed))


@pytest.mark.soak
@pytest.mark.parametrize("name", NETS)
def test_many_random_plans(name: str) -> None:
    for seed in range(12):
        case_of(name).check(*case_of(name).drawn_plan(seed))


def test_what_was_written_as_a_view_comes_back_from_the_host() -> None:
    found = case_of("views-written-to")
    flags = np.full(found.compiled.problem.n_storages, SWAP, dtype=np.int8)
    graph, _ = found.check(found.program_order(), flags)
    loaded = {value for op in graph.ops if op.target == "magis.load" for value in op.made()}
    windows = [op for op in graph.ops if op.target == "aten.as_strided.default" and loaded.issuperset(op.inputs())]
    assert windows
