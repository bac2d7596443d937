"""Aggregation as a whole: nothing is left to apply, modules are told apart, and it is done only where it saves time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from magis.extensions.paper.interim_rules import rule
from magis.graph import Graph, verify
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.rule_table import AGGREGATIONS, TIDYING, Match, aggregated, apply, attempt, matches, quickest
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


def test_nothing_is_left_to_apply(stack: Graph) -> None:
    after, applied = aggregated(stack)
    verify(after)
    assert applied["merge-addmm"] == 12
    assert modules(after, "aten.addmm.default") == [f"layers.{number}" for number in range(12)]
    index = Index(after)
    for each in (*TIDYING, *AGGREGATIONS):
        assert all(attempt(after, Match(each, bound)) is None for bound in each.occurrences(index))


def test_matches_of_different_calls_together_are_as_one_after_the_other(stack: Graph) -> None:
    merge = rule("merge-addmm")
    together, applied = aggregated(stack, [merge])
    assert applied == {"merge-addmm": 12}
    one_by_one = stack
    for _ in range(12):
        one_by_one = apply(one_by_one, next(matches(merge, one_by_one)))
    verify(together)
    assert [op.target for op in together.ops] == [op.target for op in one_by_one.ops]
    assert len(together.storages) == len(one_by_one.storages)
    assert together.persistent_bytes() == one_by_one.persistent_bytes()


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


class Overwritten(nn.Module):
    """Puts a buffer together from its own pieces, and overwrites it before the result is used."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(6, 8), nn.Linear(6, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat(torch.split(self.seen, 4, 0), 0)
        self.seen.add_(1.0)
        return (torch.tanh(self.key(x)) * self.value(x) + before).sum(1)


class Kept(Overwritten):
    """The same with two buffers, taken apart again after they were put together."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.split(torch.cat([self.seen, self.key.bias], 0), 8, 0)
        self.seen.mul_(0.5)
        return (torch.tanh(self.key(x) * left) + self.value(x) * right).sum(1)


@pytest.mark.parametrize("module", [Overwritten, Kept])
def test_what_is_overwritten_later_does_not_take_the_place_of_a_copy(module: type[nn.Module]) -> None:
    net = Net(module, rows(8, 6, dtype=torch.float32), rows(8, dtype=torch.float32), rule=ADAMW)
    graph = untangle(functionalize(captured(net.build()).graph))
    index = Index(graph)
    for each in (*TIDYING, *AGGREGATIONS):
        for bound in each.occurrences(index):
            found = attempt(graph, Match(each, bound))
            if found is not None:
                verify(found)
    after, applied = aggregated(graph)
    verify(after)
    assert applied["merge-addmm"] == 1
    assert any(op.target == "aten.cat.default" and op.phase == "forward" for op in after.ops)
