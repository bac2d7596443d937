"""Scores of several sequences as one matrix: the same numbers, and no tensor of another shape is as wide."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.capture import OptimizerSpec
from magis.graph import Graph, verify
from magis.rewrite.flat_rows import with_flat_rows
from magis.rewrite.functionalize import functionalize, untangle
from magis.simulate.simulator import replay
from tests.nets import Block, Built, Net
from tests.oracles import captured, graph_step, history, observed, workspaces

WORDS, LENGTH, WIDTH = 50, 12, 8


def likelihoods(scores: Tensor, labels: Tensor) -> Tensor:
    """Of sequences, as preference losses take them; labels that no view can flatten."""
    known = scores.float().log_softmax(-1).gather(-1, labels.roll(1, 0)[..., ::2].repeat_interleave(2, -1)[..., None])
    return -F.logsigmoid(0.1 * known.squeeze(-1).sum(-1)).mean()


def transposed_labels(scores: Tensor, labels: Tensor) -> Tensor:
    index = labels.transpose(0, -1).contiguous().transpose(0, -1)
    return -scores.log_softmax(-1).gather(-1, index[..., None]).tanh().mean()


def entropy(scores: Tensor, labels: Tensor) -> Tensor:
    log = scores.log_softmax(-1)
    return (log.exp() * log).sum(-1).square().mean() - log.gather(-1, labels[..., None]).mean()


def temperatures(scores: Tensor, labels: Tensor) -> Tensor:
    """One for each sequence, so that rows of several are not alike."""
    rates = 1 + labels[..., :1, None].double()
    log = (scores.tanh() * 3 / rates).log_softmax(-1)
    return -log.gather(-1, labels[..., None]).square().mean()


def z_loss(scores: Tensor, labels: Tensor) -> Tensor:
    log = scores.softmax(-1).log()
    return scores.logsumexp(-1).square().mean() - log.gather(-1, labels[..., None]).mean()


def selected(scores: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities without a softmax, weighted by token, a mean for each sequence."""
    tempered = scores.float() / 0.7
    known = tempered.gather(-1, labels[..., None]).squeeze(-1) - tempered.logsumexp(-1)
    mask = (labels % 3 != 0).float()
    return -F.logsigmoid((known * mask).sum(-1) / mask.sum(-1)).mean()


def selected_columns(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.logsumexp(-1, keepdim=True) - scores.gather(-1, labels[..., None])).mean()


def seen_elsewhere(scores: Tensor, labels: Tensor) -> Tensor:
    """Not by rows alone."""
    log = scores.log_softmax(-1)
    return log.cumsum(-2).square().mean() - log.gather(-1, labels[..., None]).mean()


ALL_FLAT = (likelihoods, transposed_labels, entropy, z_loss, selected, selected_columns)
LOSSES = (*ALL_FLAT, seen_elsewhere)


@functools.cache
def case(loss: Callable[[Tensor, Tensor], Tensor], lead: tuple[int, ...], bias: bool) -> tuple[Built, Graph, Graph]:
    def run(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
        return loss(net.head(torch.tanh(net.up(net.embed(ids)))), labels)

    def module() -> nn.Module:
        parts = {"embed": nn.Embedding(WORDS, WIDTH), "up": nn.Linear(WIDTH, WIDTH)}
        return Block(run, **parts, head=nn.Linear(WIDTH, WORDS, bias=bias)).double()

    ids = lambda: (torch.randint(WORDS, (*lead, LENGTH)), torch.randint(WORDS, (*lead, LENGTH)))  # noqa: E731
    net = Net(module, ids, tuple, None, OptimizerSpec("sgd", lr=0.1)).build()
    graph = untangle(functionalize(captured(net).graph))
    return net, graph, with_flat_rows(graph)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(2,), (3, 2)], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_numbers_and_bytes_stay(loss: Callable[..., Tensor], lead: tuple[int, ...], bias: bool) -> None:
    net, graph, flat = case(loss, lead, bias)
    assert flat != graph
    verify(flat)
    expected, found = (history(graph_step(each, net), 2) for each in (graph, flat))
    for their, our in zip(expected, found, strict=True):
        for key, tensor in their.items():
            torch.testing.assert_close(our[key], tensor, rtol=1e-12, atol=1e-13)
    _, peak, _ = observed(graph_step(flat, net), flat.persistent_bytes())
    assert peak == replay(flat, workspaces().of(flat)).peak_bytes


@pytest.mark.parametrize("lead", [(2,), (3, 2)], ids=str)
@pytest.mark.parametrize("loss", ALL_FLAT, ids=lambda loss: loss.__name__)
def test_all_scores_are_matrices(loss: Callable[..., Tensor], lead: tuple[int, ...]) -> None:
    _, _, flat = case(loss, lead, False)
    wide = {flat.values[value].shape for op in flat.ops for value in op.made() if "view" not in op.target}
    assert (*lead, LENGTH, WORDS) not in wide


@pytest.mark.parametrize(("loss", "lead"), [*((loss, (1,)) for loss in LOSSES), (temperatures, (2,))])
def test_others_stay_as_they_are(loss: Callable[..., Tensor], lead: tuple[int, ...]) -> None:
    _, graph, flat = case(loss, lead, False)
    assert flat == graph
