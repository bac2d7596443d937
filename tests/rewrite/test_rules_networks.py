"""Aggregation in whole training steps: query, key and value become one product, forward and backward."""

from __future__ import annotations

import re

import pytest

from magis.cases.comparison import _differences
from magis.extensions.models.building import Style
from magis.extensions.models.convnets import resnet
from magis.extensions.models.encoders import bert
from magis.extensions.models.network_names import GATE_NAMES
from magis.extensions.paper.interim_rules import RULES
from magis.graph import Graph, verify
from magis.models import get
from magis.planner.bench import Bench
from magis.results import Case
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.rule_table import Match, aggregated, attempt
from tests.nets import Built, as_built
from tests.oracles import captured, eager_step, history
from tests.rewrite.alike import check_training
from tests.rewrite.cases import TINY_BERT, TINY_RESNET

STEPS = 3
NOTHING_BUT_ROUNDING = re.compile(r"attention\.key\.bias is [0-9.]+ times as far off")
"""Softmax does not see what is added to all keys: this gradient is zero, and any sum of it as good as another."""


def normal(built: Built) -> Graph:
    return untangle(functionalize(captured(built).graph))


def products(graph: Graph, phase: str, layer: str) -> int:
    """Products of a layer's query, key and value."""
    parts = tuple(f"{layer}.{name}" for name in ("query", "key", "value"))
    names = ("aten.mm.default", "aten.addmm.default")
    return sum(op.target in names and op.phase == phase and op.module in (layer, *parts) for op in graph.ops)


def test_query_key_and_value_of_bert_become_one() -> None:
    """In double precision three steps with dropout, AdamW included, come to eager's weights and optimizer state."""
    built = as_built(bert(TINY_BERT, Style(seed=False), "bert", 0).to("float64"))
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
    check_training(after, built, history(eager_step(built), STEPS), rtol=1e-7, atol=1e-9)


def test_convolutions_of_resnet_become_one() -> None:
    """A block's first convolution and its shortcut: windows of one result, batch norms on them."""
    built = as_built(resnet(TINY_RESNET, Style(seed=False), "resnet", 0).to("float64"))
    before = normal(built)
    after, applied = aggregated(before)
    verify(after)
    assert applied["merge-conv"] == 1
    check_training(after, built, history(eager_step(built), STEPS), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "seeds"), [("bert", STEPS), ("gpt_neo", 1), ("btlm", 1)])
def test_rounding(name: str, seeds: int) -> None:
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
    for seed in range(seeds):
        assert [text for text in _differences(subject, graph, seed) if not NOTHING_BUT_ROUNDING.search(text)] == []


@pytest.mark.parametrize("name", GATE_NAMES)
def test_one_match_of_every_rule(name: str) -> None:
    """Wherever the first occurrence of a rule is possible, a legal graph comes out."""
    graph = normal(as_built(get(name).build("small", 0)))
    index = Index(graph)
    legal = 0
    for each in RULES:
        first = next(each.occurrences(index), None)
        after = None if first is None else attempt(graph, Match(each, first))
        if after is not None:
            verify(after)
            legal += 1
    assert legal > 0
