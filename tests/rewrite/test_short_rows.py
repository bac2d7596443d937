"""Rows that a slice drops are not computed: the same numbers, with no tensor of all rows of scores left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.capture import OptimizerSpec
from magis.graph import Graph, verify
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.short_rows import with_short_rows
from magis.simulate.simulator import replay
from tests.nets import Block, Built, Net
from tests.oracles import captured, graph_step, history, observed, workspaces

WORDS, LENGTH, WIDTH = 50, 12, 8


def shifted(scores: Tensor, labels: Tensor) -> Tensor:
    rows = scores[..., :-1, :].contiguous().view(-1, WORDS)
    return F.cross_entropy(rows.float(), labels[..., 1:].contiguous().view(-1))


def in_float32(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.float()[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def likelihood(scores: Tensor, labels: Tensor) -> Tensor:
    """As preference losses take it."""
    known = scores[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)
    return -F.logsigmoid(0.1 * (known * (labels[:, 1:] != 0)).sum(-1)).mean()


def capped(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((30 * torch.tanh(scores / 30))[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def backwards(scores: Tensor, labels: Tensor) -> Tensor:
    """The first word from the second."""
    return F.cross_entropy((scores / 2)[:, 1:].reshape(-1, WORDS), labels[:, :-1].reshape(-1))


def regularized(scores: Tensor, labels: Tensor) -> Tensor:
    return shifted(scores, labels) + scores.square().mean()


def two_slices(scores: Tensor, labels: Tensor) -> Tensor:
    return shifted(scores, labels) + scores[:, -1].square().mean()


def columns(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :, :-1].reshape(-1, WORDS - 1), labels.reshape(-1).clamp(max=WORDS - 2))


MOVED = (shifted, in_float32, likelihood, capped, backwards)
KEPT = (regularized, two_slices, columns)
"""All rows are needed, or it is no rows that are dropped."""


@functools.cache
def case(loss: Callable[[Tensor, Tensor], Tensor], batch: int, bias: bool) -> tuple[Built, Graph, Graph]:
    def run(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
        return loss(net.head(torch.tanh(net.up(net.embed(ids)))), labels)

    def module() -> nn.Module:
        parts = {"embed": nn.Embedding(WORDS, WIDTH), "up": nn.Linear(WIDTH, WIDTH)}
        return Block(run, **parts, head=nn.Linear(WIDTH, WORDS, bias=bias)).double()

    ids = lambda: (torch.randint(WORDS, (batch, LENGTH)), torch.randint(WORDS, (batch, LENGTH)))  # noqa: E731
    net = Net(module, ids, tuple, None, OptimizerSpec("sgd", lr=0.1)).build()
    graph = untangle(functionalize(captured(net).graph))
    return net, graph, with_short_rows(graph)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("loss", MOVED, ids=lambda loss: loss.__name__)
def test_a_slice_of_rows_moves_ahead_of_the_product(loss: Callable[..., Tensor], batch: int, bias: bool) -> None:
    assert_moved(*case(loss, batch, bias), batch)


def assert_moved(net: Built, graph: Graph, short: Graph, batch: int) -> None:
    """The step has no scores of all rows of a pass any more, and computes the same in the bytes predicted."""
    verify(short)
    wide = {value.shape for value in short.values.values() if value.shape[-1:] == (WORDS,)}
    assert not wide & {(batch * LENGTH, WORDS), (batch, LENGTH, WORDS)}
    expected, found = (history(graph_step(each, net), 2) for each in (graph, short))
    for their, our in zip(expected, found, strict=True):
        for key, tensor in their.items():
            torch.testing.assert_close(our[key], tensor, rtol=1e-12, atol=1e-13)
    _, peak, _ = observed(graph_step(short, net), short.persistent_bytes())
    assert peak == replay(short, workspaces().of(short)).peak_bytes


@pytest.mark.parametrize("loss", [likelihood, capped], ids=lambda loss: loss.__name__)
def test_slices_of_several_passes_move(loss: Callable[..., Tensor]) -> None:
    """Each with the gradient of its own pass."""

    def run(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
        passes = zip(ids.split(1), labels.split(1), strict=True)
        return torch.stack([loss(net.head(torch.tanh(net.embed(one))), its) for one, its in passes]).logsumexp(0)

    parts = lambda: {"embed": nn.Embedding(WORDS, WIDTH), "head": nn.Linear(WIDTH, WORDS)}  # noqa: E731
    ids = lambda: (torch.randint(WORDS, (3, LENGTH)), torch.randint(WORDS, (3, LENGTH)))  # noqa: E731
    net = Net(lambda: Block(run, **parts()).double(), ids, tuple, None, OptimizerSpec("sgd", lr=0.1)).build()
    assert_moved(net, graph := untangle(functionalize(captured(net).graph)), with_short_rows(graph), 1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("loss", KEPT, ids=lambda loss: loss.__name__)
def test_rows_that_another_operator_needs_stay(loss: Callable[..., Tensor], batch: int) -> None:
    _, graph, short = case(loss, batch, True)
    assert short == graph


def test_strides_of_results_stay() -> None:
    _, graph, short = case(shifted, 2, False)
    assert short != graph
    (rows,) = [
        op.made()[0]
        for op in graph.ops
        if op.target == "aten.slice.Tensor" and len(graph.values[op.made()[0]].shape) == 3
    ]
    seen = replace(graph, outputs=(*graph.outputs, rows))
    assert with_short_rows(seen) == seen
