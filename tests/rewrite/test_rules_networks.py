"""Aggregation in whole training steps: query, key and value become one product, forward and backward."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

from magis.capture.workload import Workload
from magis.cases.comparison import _differences
from magis.graph import Graph, verify
from magis.models import GATE_NAMES, get
from magis.models.building import Style
from magis.models.convnets import resnet
from magis.models.encoders import bert
from magis.planner.bench import Bench
from magis.results import Case
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.rule_table import RULES, Match, aggregated, attempt
from magis.simulate.simulator import replay
from tests.nets import Built
from tests.oracles import captured, eager_step, graph_step, history, measured, workspaces
from tests.rewrite.cases import TINY_BERT, TINY_RESNET

STEPS = 3
NOTHING_BUT_ROUNDING = re.compile(r"attention\.key\.bias is [0-9.]+ times as far off")
"""Softmax does not see what is added to all keys: this gradient is zero, and any sum of it as good as another."""


@dataclass(frozen=True)
class Net:
    """A small network in double precision."""

    work: Workload

    def build(self) -> Built:
        work = self.work.to("float64")
        return Built(work.module, work.inputs, work.targets, work.loss_fn, work.optimizer, work.explicit_attention)


def normal(built: Built) -> Graph:
    return untangle(functionalize(captured(built).graph))


def products(graph: Graph, phase: str, layer: str) -> int:
    """Products of a layer's query, key and value."""
    parts = tuple(f"{layer}.{name}" for name in ("query", "key", "value"))
    names = ("aten.mm.default", "aten.addmm.default")
    return sum(op.target in names and op.phase == phase and op.module in (layer, *parts) for op in graph.ops)


def test_query_key_and_value_of_bert_become_one() -> None:
    """In double precision three steps with dropout, AdamW included, come to eager's weights and optimizer state."""
    built = Net(bert(TINY_BERT, Style(seed=False), "bert", 0)).build()
    before = normal(built)
    after, _ = aggregated(before)
    verify(after)
    layer = "layers.0.attention"
    assert products(before, "forward", layer) == 3
    assert products(after, "forward", layer) == 1
    # weight gradients and input gradients: the latter stand in no module, or in that of their sum
    assert (
        sum(op.target == "aten.mm.default" for op in before.ops)
        - sum(op.target == "aten.mm.default" for op in after.ops)
        == 4 * TINY_BERT.layers
    )
    weights = [number for number, value in after.values.items() if after.storages[value.storage].kind == "parameter"]
    assert not [op for op in after.ops if op.target == "aten.cat.default" and set(weights) & set(op.inputs())]
    expected, found = history(eager_step(built), STEPS), history(graph_step(after, built), STEPS)
    for theirs, ours in zip(expected, found, strict=True):
        assert theirs.keys() == ours.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-7, atol=1e-9)
    profile = replay(after, workspaces().of(after))
    seen = measured(graph_step(after, built), after.persistent_bytes())
    assert seen == (profile.peak_bytes, profile.tensor_bytes)


def test_convolutions_of_resnet_become_one() -> None:
    """A block's first convolution and its shortcut: windows of one result, batch norms on them."""
    built = Net(resnet(TINY_RESNET, Style(seed=False), "resnet", 0)).build()
    before = normal(built)
    after, applied = aggregated(before)
    verify(after)
    assert applied["merge-conv"] == 1
    expected, found = history(eager_step(built), STEPS), history(graph_step(after, built), STEPS)
    for theirs, ours in zip(expected, found, strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-8)
    profile = replay(after, workspaces().of(after))
    assert measured(graph_step(after, built), after.persistent_bytes()) == (profile.peak_bytes, profile.tensor_bytes)


@pytest.mark.parametrize("name", ["bert", "gpt_neo", "btlm"])
def test_rounding(name: str) -> None:
    """In single precision: loss and gradients as close to the exact ones as eager's; bytes as simulated."""
    subject = Bench().subject(Case(name, "magis", "cpu", "small"))
    graph, applied = aggregated(subject.untangled)
    verify(graph)
    assert applied["merge-mm-rows"] > 0
    assert applied["merge-mm"] + applied["merge-addmm"] > 0
    assert applied["merge-sum-views"] + applied["merge-sum-views-back"] + applied["merge-sum-chain-back"] > 0
    step = subject.generated(graph)
    step.prepare()
    step.run()
    assert subject.measure(step) == subject.simulate_graph(graph)
    for seed in range(STEPS):
        assert [text for text in _differences(subject, graph, seed) if not NOTHING_BUT_ROUNDING.search(text)] == []


@pytest.mark.parametrize("name", GATE_NAMES)
def test_one_match_of_every_rule(name: str) -> None:
    """Wherever the first occurrence of a rule is possible, a legal graph comes out."""
    work = get(name).build("small", 0)
    built = Built(work.module, work.inputs, work.targets, work.loss_fn, work.optimizer, work.explicit_attention)
    graph = normal(built)
    index = Index(graph)
    legal = 0
    for each in RULES:
        first = next(each.occurrences(index), None)
        after = None if first is None else attempt(graph, Match(each, first))
        if after is not None:
            verify(after)
            legal += 1
    assert legal > 0
