"""Aggregation as a whole: nothing is left to apply, modules are told apart, and it is done only where it saves time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from magis.ir import Graph, verify
from magis.rewrite.normalize import functionalize
from magis.rewrite.rules.greedy import TIDYING, aggregated, quickest
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.rule import Match, attempt
from magis.rewrite.rules.table import AGGREGATIONS
from magis.rewrite.untangle import untangle
from tests.nets import ADAMW, Net, rows
from tests.oracles import captured


class Heads(nn.Module):
    """Two products of one input, added up after a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.key(x)) + self.value(x)


class Stack(nn.Module):
    """Twelve such layers: the names of the last ones begin like that of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Heads() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum(1)


@pytest.fixture(scope="module")
def stack() -> Graph:
    net = Net(Stack, rows(8, 6, dtype=torch.float32), rows(8, dtype=torch.float32), rule=ADAMW)
    return untangle(functionalize(captured(net.build()).graph))


def modules(graph: Graph, target: str) -> list[str]:
    return [op.module for op in graph.ops if op.target == target and op.phase == "forward"]


def calls(graph: Graph) -> int:
    return len(graph.ops)


def test_nothing_is_left_to_apply(stack: Graph) -> None:
    after, applied = aggregated(stack)
    verify(after)
    assert applied["merge-addmm"] == 12
    assert modules(after, "aten.addmm.default") == [f"layers.{number}" for number in range(12)]
    index = Index(after)
    for each in (*TIDYING, *AGGREGATIONS):
        assert all(attempt(after, Match(each, bound)) is None for bound in each.occurrences(index))


def test_one_module_stands_apart_from_those_whose_names_begin_alike(stack: Graph) -> None:
    after, applied = aggregated(stack, within="layers.1")
    verify(after)
    assert applied["merge-addmm"] == 1
    products = modules(after, "aten.addmm.default")
    assert products.count("layers.1") == 1
    assert {f"layers.{number}.key" for number in range(12) if number != 1} <= set(products)


@pytest.mark.parametrize(("share", "merged"), [(0.9, True), (0.994, True), (0.996, False), (1.0, False), (1.2, False)])
def test_calls_are_merged_where_that_saves_half_a_percent(stack: Graph, share: float, merged: bool) -> None:
    """Time falls in proportion to the layers that are merged, to ``share`` with all of them."""

    def nanoseconds(graph: Graph) -> int:
        done = sum(not name.endswith(("key", "value")) for name in modules(graph, "aten.addmm.default"))
        return round(1e6 * (1 - (1 - share) * done / 12))

    found = quickest(stack, nanoseconds)
    assert (found is not stack) == merged
    if merged:
        assert found.ops == aggregated(stack)[0].ops


def test_without_calls_that_share_an_input_nothing_is_tried(stack: Graph) -> None:
    def never(_: Graph) -> int:
        raise AssertionError("there is nothing to time")

    net = Net(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0)),
        rows(8, 6, dtype=torch.float32),
        rows(8, dtype=torch.float32),
        rule=ADAMW,
    )
    graph = untangle(functionalize(captured(net.build()).graph))
    assert quickest(graph, never) is graph
