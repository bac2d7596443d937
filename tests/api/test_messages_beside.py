"""Messages of planned ranks beside the operators: in the plan, in the generated code, and on two real ranks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from magis.capture import Workload
from magis.cases.run_case import run_case
from magis.extensions.ranks.plans.planned_ranks import PlannedRanks
from magis.extensions.ranks.prediction.rank_memory import fake_world
from magis.graph import ARRIVED, BESIDE, Graph, Op
from magis.graph.verify import problems
from magis.ops.collectives import all_reduce, group_name, is_message, under_way
from magis.ops.optimizers import OptimizerSpec
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.evaluator import evaluate, expand
from magis.simulate.problem import KEEP, RECOMPUTE, Events, Int8s, Int32s
from magis.simulate.simulator import replay
from magis.simulate.timeline import MESSAGES, elapsed_ns, timeline
from magis.strategies.rank_step import World
from magis.strategies.single_device import on_fake_tensors
from tests.api.cut_nets import two_heads

LAYERS = 4


def blocks() -> Workload:
    """Blocks whose messages are shorter than their operators, on a simulated H100."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(LAYERS)]
    batch, target = torch.randn(8192, 512), torch.randn(8192, 512)
    rule = OptimizerSpec("adamw", lr=1e-3)
    names = tuple(map(str, range(LAYERS)))
    return Workload("blocks", nn.Sequential(*layers), (batch,), (target,), nn.functional.mse_loss, rule, blocks=names)


@pytest.fixture(scope="module", params=["magis+fsdp", "magis+ddp"])
def subject(request: pytest.FixtureRequest) -> Subject:
    strategy = PlannedRanks(request.param, device="sim:h100")
    with fake_world(2, 0):
        work = on_fake_tensors(blocks())[1]
        found = strategy.subject(strategy.own_part(work, World(2, 0, fake=True)))
        assert found.normal.ops
        return found


def compiled(subject: Subject, ceiling: int = 1 << 40) -> Compiled:
    found = compile_problem(subject.normal, subject.roofline)
    return replace(found, problem=replace(found.problem, ceiling=ceiling))


def plan(found: Compiled, flag: int) -> tuple[Int32s, Int8s, Events, Graph]:
    problem = found.problem
    order, flags = np.arange(problem.n_nodes, dtype=np.int32), np.full(problem.n_storages, flag, dtype=np.int8)
    events = expand(problem, order, flags)
    return order, flags, events, realize(found, events)


@pytest.mark.parametrize("flag", [KEEP, RECOMPUTE])
def test_bytes_and_time_of_the_graph_are_those_of_the_plan(subject: Subject, flag: int) -> None:
    found, costs = compiled(subject), subject.roofline
    order, flags, _, graph = plan(found, flag)
    judged = evaluate(found.problem, order, flags)
    assert not [*problems(graph)]
    profile = replay(graph, costs.workspace, rounding=costs.rounding)
    assert (profile.tensor_bytes, profile.peak_bytes) == (judged.tensor_peak, judged.peak)
    assert elapsed_ns(graph, costs.nominal) == judged.latency_ns
    spans = timeline(graph, costs.nominal, costs.workspace, profile, rounding=costs.rounding)
    sent = [span for span in spans if span.stream == MESSAGES]
    assert len(sent) == sum(op.target in BESIDE for op in graph.ops) == len(under_way(graph.ops))


def test_one_message_at_a_time_is_on_the_links() -> None:
    strategy = PlannedRanks("magis+tp2+sp", device="sim:h100")
    with fake_world(4, 0):
        work = on_fake_tensors(two_heads())[1]
        subject = strategy.subject(strategy.own_part(work, World(4, 0, fake=True)))
        found, costs = compiled(subject), subject.roofline
    order, flags, _, graph = plan(found, KEEP)
    assert elapsed_ns(graph, costs.nominal) == evaluate(found.problem, order, flags).latency_ns
    profile = replay(graph, costs.workspace, rounding=costs.rounding)
    spans = [
        span
        for span in timeline(graph, costs.nominal, costs.workspace, profile, rounding=costs.rounding)
        if is_message(span.op)
    ]
    assert {span.stream for span in spans} == {MESSAGES, "compute"}, "some are waited for at once"
    for one, other in pairwise(spans):
        assert one.start_ms + one.ms <= other.start_ms + 1e-9


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x, "sum", group_name("dp", 2))

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Changing(nn.Module):
    """Changes part of what a message brings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = _Summed.apply(torch.relu(self.first(x)))  # type: ignore[no-untyped-call]
        y[1:].mul_(0.5)
        out: Tensor = self.second(y + 1)
        return out


def test_what_changes_a_result_in_place_waits_for_it() -> None:
    batch, rule = torch.randn(4, 8), OptimizerSpec("sgd", lr=0.1)
    work = Workload("changing", _Changing(), (batch,), (batch,), nn.functional.mse_loss, rule)
    strategy = PlannedRanks("magis+ddp", device="sim:h100")
    with fake_world(2, 0):
        found = compiled(strategy.subject(on_fake_tensors(work)[1]))
        graph = plan(found, KEEP)[-1]
    assert not list(problems(graph))
    sums = [op for op in graph.ops if op.target in BESIDE]
    assert sums
    assert not any(op.target == ARRIVED for op in graph.ops)


def changed(graph: Graph, change: Any) -> list[str]:
    """What is wrong with a graph whose operators are changed."""
    ops = [replace(op, id=at) for at, op in enumerate(change(list(graph.ops)))]
    return [*problems(replace(graph, ops=tuple(ops)))]


def test_a_message_that_is_used_too_early_is_a_broken_rule(subject: Subject) -> None:
    graph = plan(compiled(subject), KEEP)[3]
    at = next(at for at, op in enumerate(graph.ops) if op.target == ARRIVED)
    waits = graph.ops[at]

    def late(ops: list[Op]) -> list[Op]:
        return [*ops[:at], *ops[at + 1 :], waits]

    def twice(ops: list[Op]) -> list[Op]:
        return [*ops, waits]

    assert any("still under way" in line for line in changed(graph, late))
    assert any("which no message brings" in line for line in changed(graph, twice))
    assert any("is not waited for where it was sent last" in line for line in changed(graph, early(waits)))


def early(waits: Op) -> Any:
    """A change that waits before anything is sent."""
    return lambda ops: [waits, *(op for op in ops if op.id != waits.id)]


def small() -> Workload:
    """Blocks for real ranks of a CPU."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    rule, names = OptimizerSpec("adamw", lr=1e-2), ("0", "1", "2")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    given = (torch.randn(1024, 64),), (torch.randn(1024, 64),)
    return Workload("local", nn.Sequential(*layers), *given, loss, rule, blocks=names)


@pytest.mark.parametrize("strategy", ["magis+fsdp", "magis+ddp"])
def test_two_ranks_measure_what_was_planned_with_messages_under_way(strategy: str) -> None:
    case = Case("tests.api.test_messages_beside:small", strategy, "cpu", "small", memory_ratio=0.9, ranks=2, budget=200)
    with closing(Bench()) as bench:
        result = run_case(case, cache=bench)
    assert result.search.feasible
    assert result.numbers == "bit-identical"
    assert result.note == ""
    assert [rank.predicted.tensor_bytes for rank in result.ranks if rank.predicted] == [
        rank.measured.tensor_bytes for rank in result.ranks if rank.measured
    ]


def test_the_plan_of_those_ranks_has_messages_under_way() -> None:
    for name in ("magis+fsdp", "magis+ddp"):
        strategy = PlannedRanks(name, budget=200)
        with fake_world(2, 0):
            own = strategy.subject(strategy.own_part(on_fake_tensors(small())[1], World(2, 0, fake=True)))
            ops = strategy.planned(own).graph.ops
        sent = {value: at for at, op in enumerate(ops) if op.target in BESIDE for value in op.made()}
        waits = [at - sent[op.inputs()[0]] for at, op in enumerate(ops) if op.target == ARRIVED]
        assert len(waits) == len(sent) > 0
        assert max(waits) > 1, "somebody computes meanwhile"
