"""What stands in the way of running a step in parts, in the words that a user reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis.fission.loss_suffix import blocked
from magis.graph import Graph
from magis.ops.splits import splits, why_not
from magis.planner.bench import Bench
from magis.results import Case
from magis.rewrite.functionalize import functionalize, untangle
from tests.nets import NETS, Block, Net, labels, rows
from tests.oracles import captured


def form(net: Net) -> Graph:
    """The step in the form that fission works on."""
    return untangle(functionalize(captured(net.build()).graph))


def test_a_norm_over_the_batch_is_named_with_its_calls() -> None:
    names, reason = ("native_batch_norm", "native_batch_norm_backward"), "batch statistics couple the batch"
    found = blocked(form(NETS["batch-norm"]))
    assert found == ", ".join(f"{name} (2 calls: {reason})" for name in names)


def test_those_that_stand_in_the_way_most_often_come_first() -> None:
    """Four kinds of them, of which three are named."""

    def run(block: nn.Module, x: Tensor) -> Tensor:
        h = block.a(x)
        parts = [h.softmax(0), h.softmax(0), h.cumsum(0), h.log_softmax(0), h.flip(0)]
        return torch.stack([part.sum() for part in parts]).sum()

    net = Net(lambda: Block(run, a=nn.Linear(6, 4)), rows(4, 6), loss_fn=None)
    found = blocked(form(net))
    assert found.startswith("_softmax (2 calls: ")
    assert found.count(" calls: ") == 3


def test_random_numbers_are_drawn_whole_and_in_nobodys_way() -> None:
    """The mask of a dropout stays outside of the region, which takes it in stretches."""
    net = Net(NETS["dropout"].module, rows(40, 9), labels(40, 9), F.cross_entropy)
    graph = form(net)
    assert any(op.random for op in graph.ops)
    assert blocked(graph) == ""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("unet", "native_batch_norm (18 calls: batch statistics couple the batch), "),
        ("seed-unet", ""),
        ("vit", ""),
        ("gpt_neo", ""),
    ],
)
def test_networks(model: str, words: str) -> None:
    subject = Bench().subject(Case(model, "magis", "cpu", "small", memory_ratio=0.5))
    found = blocked(subject.untangled)
    assert found.startswith(words)
    assert bool(found) == bool(words)


# --- why_not ----------------------------------------------------------------------------------------------------------


def test_why_not_is_empty_exactly_where_there_is_a_way() -> None:
    for name in ("batch-norm", "conv-group-norm", "attention-explicit", "tied", "indexing", "dropout"):
        graph = form(NETS[name])
        for op in graph.ops:
            ways = splits(op, graph.values)
            for number, value in enumerate(op.inputs()):
                for dim in range(len(graph.values[value].shape)):
                    reason = why_not(op, graph.values, number, dim)
                    assert (reason == "") == any(way.inputs[number] == dim for way in ways), (name, op)
                    assert "\n" not in reason
