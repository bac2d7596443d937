"""What stands in the way of running a step in parts, in the words that a user reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis.fission.loss_suffix import blocked
from magis.graph import Graph, parse
from magis.ops.splits import splits, why_not
from magis.planner.bench import Bench
from magis.results import Case
from magis.rewrite.functionalize import functionalize, untangle
from tests.nets import NETS, Block, Net, labels, mlp, rows
from tests.oracles import captured


def form(net: Net) -> Graph:
    """The step in the form that fission works on."""
    return untangle(functionalize(captured(net.build()).graph))


def trained(batch: int) -> Net:
    return Net(mlp(), rows(batch, 12), labels(batch, 5), F.cross_entropy)


@pytest.mark.parametrize("name", ["conv-group-norm", "batch-norm-evaluated", "embedding"])
def test_nothing_is_said_where_nothing_is_in_the_way(name: str) -> None:
    assert blocked(form(NETS[name])) == ""


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


def test_a_softmax_over_the_batch_is_not_cut_along_it() -> None:
    net = Net(lambda: nn.Sequential(nn.Linear(6, 8), nn.Softmax(0), nn.Linear(8, 3)), rows(4, 6), rows(4, 3))
    assert blocked(form(net)).startswith("_softmax (1 calls: every result depends on ")


def test_random_numbers_are_drawn_whole_and_in_nobodys_way() -> None:
    """The mask of a dropout stays outside of the region, which takes it in stretches."""
    net = Net(NETS["dropout"].module, rows(40, 9), labels(40, 9), F.cross_entropy)
    graph = form(net)
    assert any(op.random for op in graph.ops)
    assert blocked(graph) == ""


@pytest.mark.parametrize(("batch", "words"), [(1, "a batch of 1 has no parts"), (2, ""), (7, "")])
def test_batches(batch: int, words: str) -> None:
    """Seven parts of one row are parts."""
    assert blocked(form(trained(batch))) == words


def test_sizes_without_a_common_number_of_parts() -> None:
    net = Net(
        lambda: Block(lambda m, x, y: m.a(x).sum() + m.a(y).sum(), a=nn.Linear(6, 3)),
        lambda: (torch.randn(3, 6), torch.randn(4, 6)), loss_fn=None,
    )  # fmt: skip
    assert blocked(form(net)) == "a batch of 3 or 4 has no equal parts with the other sizes of the step"


def test_a_step_without_batch() -> None:
    graph = parse(
        "magis graph 1\nstorage 1 parameter 16\nstorage 2 temporary 16\n"
        'value 1 @1 float32 [4] {1} +0 "parameter:w"\nvalue 2 @2 float32 [4] {1} +0\ninput 1\n'
        "op 0 %2 = aten.exp.default(%1) reads 1:0 phase forward\noutput 2\n"
    )
    assert blocked(graph) == "no input has a batch dimension"


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
