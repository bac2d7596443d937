"""Relief at the peak: loops around single operators, kept where the best plan with them is better."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis import optimize
from magis.errors import UsageError
from magis.fission.proof import verify_fission
from magis.graph import Graph, dump, verify
from magis.rewrite.realize import realize
from magis.search import split_at_peak as relief
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.driver import SearchResult, search
from magis.search.split_at_peak import Relieved, in_order, relieve
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.simulator import replay
from tests.search.subjects import BUDGET, Step, step
from tests.training.loops import trained_as_planned


def realized(given: Step, found: Relieved) -> Graph:
    """The plan as a graph: sound, the same step, with the loops that were told, and of the bytes that were said."""
    events = expand(found.compiled.problem, found.result.order, found.result.flags)
    graph = realize(found.compiled, events)
    verify(graph)
    verify_fission(graph)
    verify_fission(found.graph, given.graph)
    assert replay(graph, given.costs.workspace, rounding=given.costs.rounding).peak_bytes <= found.result.peak
    told = sorted(int(words.split(" in ")[1].split()[0]) for words in found.loops)
    assert sorted(op.body.parts for op in found.graph.ops if op.body is not None) == told
    return graph


def relieved(given: Step, goal: Objective) -> Relieved | None:
    return relieve(given.graph, given.costs, PlanRequest(goal, 0, BUDGET), reuse=True)


@pytest.mark.parametrize("name", ["blocks", "seed-unet", "convolution"])
def test_the_order_of_a_plan_is_an_order_of_the_graph(name: str) -> None:
    given = step(name)
    result = given.whole(Objective(memory_limit=int(0.7 * given.peak)))
    graph = in_order(given.compiled, result)
    verify(graph)
    verify_fission(graph, given.graph)
    kinds = [Counter(op.target for op in each.ops) for each in (graph, given.graph)]
    assert kinds[0] == kinds[1]
    assert {op.made() for op in graph.ops} == {op.made() for op in given.graph.ops}
    assert [op.id for op in graph.ops] == list(range(len(graph.ops)))


def test_the_order_is_that_of_the_plan() -> None:
    """Nodes of the graph in its new order stand as the plan says, whatever floats between them."""
    given = step("seed-unet")
    result = given.whole(Objective(memory_limit=int(0.7 * given.peak)))
    compiled = compile_problem(in_order(given.compiled, result), given.costs, reuse=True)
    before = [given.compiled.nodes[node][0].made() for node in result.order.tolist()]
    assert [group[0].made() for group in compiled.nodes] == before


@pytest.mark.parametrize("name", ["blocks", "seed-unet", "perceptron"])
@pytest.mark.parametrize("mode", ["memory", "latency"])
def test_a_plan_with_loops_is_better_or_there_is_none(name: str, mode: str) -> None:
    given = step(name)
    slower = Objective(latency_limit_ns=int(1.1 * given.latency_ns))
    goal = Objective(memory_limit=int(0.5 * given.peak)) if mode == "memory" else slower
    whole = given.whole(goal)
    found = relieved(given, goal)
    if found is not None:
        realized(given, found)
        assert goal.key(found.result.peak, found.result.latency_ns) < goal.key(whole.peak, whole.latency_ns)
        assert found.states > found.result.states


def test_an_up_sampling_network_gets_room() -> None:
    given = step("seed-unet")
    goal = Objective(memory_limit=int(0.4 * given.peak))
    found, again = relieved(given, goal), relieved(given, goal)
    assert found is not None
    assert again is not None
    assert found.loops == again.loops
    assert found.loops[0].startswith("ups.")
    assert dump(realized(given, found)) == dump(realized(given, again))
    assert found.result.peak < given.whole(goal).peak


def test_a_convolution_at_the_peak_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time is no object: so small a step is much slower in parts."""
    given = step("convolution")
    goal = Objective(memory_limit=given.peak // 2)
    assert relieved(given, goal) is None
    monkeypatch.setattr(relief, "TOO_SLOW", 1.0)
    found = relieved(given, goal)
    assert found is not None
    inside = {each.target for op in found.graph.ops if op.body is not None for each in op.body.graph.ops}
    assert "aten.convolution_backward.default" in inside
    realized(given, found)
    assert found.result.peak < 0.8 * given.whole(goal).peak


# --- a brief search ---------------------------------------------------------------------------------------------------


def brief(given: Step, goal: Objective, *, short: bool) -> SearchResult:
    return search(
        given.compiled.problem,
        goal,
        budget=2000,
        seed=0,
        brief=short,
    )


@pytest.mark.parametrize("name", ["blocks", "seed-unet"])
def test_a_brief_search_says_the_truth_and_looks_at_less(name: str) -> None:
    given = step(name)
    goal = Objective(memory_limit=int(0.8 * given.peak))
    short, long = (brief(given, goal, short=each) for each in (True, False))
    again = brief(given, goal, short=True)
    assert (short.peak, short.latency_ns, short.states) == (again.peak, again.latency_ns, again.states)
    assert np.array_equal(short.flags, again.flags)
    assert short.feasible == (short.peak <= int(0.8 * given.peak))
    assert goal.key(long.peak, long.latency_ns) <= goal.key(short.peak, short.latency_ns)
    events = expand(given.compiled.problem, short.order, short.flags)
    graph = realize(given.compiled, events)
    verify(graph)
    assert replay(graph, given.costs.workspace, rounding=given.costs.rounding).peak_bytes == short.peak


class Windowed(nn.Module):
    """Attention to the last 32 tokens, with a mask that is wider than all else while it is made; and a wide head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(512, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, 512, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        apart = at[:, None] - at[None]
        q, k, v = (each[:, None] for each in self.mix(self.embed(ids)).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < 32)).squeeze(1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_loops_stand_beside_one_to_the_loss_and_back(tmp_path: Path) -> None:
    """Around the operators at the peak of the step with that loop; here around those that make the mask."""
    torch.manual_seed(0)
    data = {"ids": torch.randint(512, (1, 256)), "labels": torch.randint(512, (1, 256))}
    trained_as_planned(Windowed(), data, 0.3, tmp_path / "step.plan")


class Unread(nn.Module):
    """A product that nothing reads stands at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.randn(4, 6))
        self.norms = nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.RMSNorm(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch.tensordot(y, self.unread, 1)
        out: Tensor = self.norms(x).index_select(2, torch.tensor([0, 1, 0]))
        return out


def test_no_loop_stands_around_what_nothing_reads() -> None:
    """A loop without results, beside the one to the loss and back, was taken for that one."""
    torch.manual_seed(0)
    net, x = Unread(), torch.randn(8, 3, 4)
    batch = ((x, x[:1].expand_as(x)), ())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with pytest.raises(UsageError, match="no plan found"):
        optimize(net, batch, lambda out: out.logsumexp(-1).mean(), optimizer, memory_ratio=0.5, budget=20)
