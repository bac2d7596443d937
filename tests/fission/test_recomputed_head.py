"""Losses whose gradients need the whole loss: the head runs twice, in parts, and computes what it did."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.capture import OptimizerSpec
from magis.fission.proof import verify_fission
from magis.fission.recomputed_head import RecomputedHead, heads, recomputed_head
from magis.graph import Graph, verify
from magis.rewrite.flat_rows import with_flat_rows
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.losses import with_lean_cross_entropy
from magis.rewrite.short_rows import with_short_rows
from magis.search.fission_pareto import levels_at, work_of
from magis.search.split_at_peak import with_loops_in_place
from magis.simulate.simulator import replay
from tests.fission.test_components import COSTS
from tests.nets import Block, Built, Net, labels, rows
from tests.oracles import captured, graph_step, history, observed, workspaces
from tests.search.subjects import wide_convolution
from tests.training.loops import trained_as_planned

WORDS, LENGTH, WIDTH = 256, 32, 16
"""31 rows of scores: no number of equal parts."""


def likelihoods(scores: Tensor, labels: Tensor) -> Tensor:
    """Of every sequence."""
    known = scores[:, :-1].float().log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)
    return (known * (labels[:, 1:] != 0)).sum(-1)


def preference(scores: Tensor, labels: Tensor) -> Tensor:
    """Of the first sequence to the second (DPO)."""
    first, second = likelihoods(scores, labels).chunk(2)
    return -F.logsigmoid(0.1 * (first - second) - 0.3).mean()


def ranking(scores: Tensor, labels: Tensor) -> Tensor:
    """Of all sequences, the first one best (RRHF, listwise)."""
    return -(likelihoods(scores, labels) / LENGTH).log_softmax(0)[0]


def odds(scores: Tensor, labels: Tensor) -> Tensor:
    """Of the first sequences to the second ones, beside their own likelihood (ORPO)."""
    mean = likelihoods(scores, labels) / LENGTH
    first, second = (mean - torch.log1p(-mean.exp())).chunk(2)
    return -mean.chunk(2)[0].mean() - 0.1 * F.logsigmoid(first - second).mean()


def selected(scores: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of the labels without a softmax (TRL's selective_log_softmax)."""
    tempered, index = scores[:, :-1].float() / 0.9, labels[:, 1:, None]
    return tempered.gather(-1, index).squeeze(-1) - tempered.logsumexp(-1)


def normalized(scores: Tensor, labels: Tensor) -> Tensor:
    """The first sequence to the second, each a mean over its tokens (SimPO)."""
    mask = (labels[:, 1:] != 0).float()
    first, second = ((selected(scores, labels) * mask).sum(-1) / mask.sum(-1)).chunk(2)
    return -F.logsigmoid(2.0 * (first - second) - 0.5).mean()


def perplexity(scores: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy's exponential."""
    return F.cross_entropy(scores[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1)).exp()


def policy(scores: Tensor, labels: Tensor) -> Tensor:
    """Of each token for itself (GRPO): one loop has all of it."""
    known = scores[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)
    ratio = (known - known.detach()).exp()
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()


def plain(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def policy_of_selected(scores: Tensor, labels: Tensor) -> Tensor:
    known = selected(scores, labels)
    ratio = (known - known.detach()).exp()
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()


def plain_of_selected(scores: Tensor, labels: Tensor) -> Tensor:
    return -selected(scores, labels).sum() / (labels[:, 1:] != 0).sum()


def plain_of_columns(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.logsumexp(-1, keepdim=True) - scores.gather(-1, labels[..., None])).mean()


def distilled(scores: Tensor, labels: Tensor) -> Tensor:
    """The divergence from a teacher's likelihoods: wide, but not the head's (a head of the sum alone would be given
    what it is to spare)."""
    theirs = (6.0 * F.one_hot(labels, WORDS)).to(scores.dtype).softmax(-1)
    return F.kl_div(scores.log_softmax(-1), theirs, reduction="batchmean")


RATIO = 0.45
TWICE = (preference, ranking, odds, normalized, perplexity)
SELECTED = (policy_of_selected, plain_of_selected, plain_of_columns)


def network(loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    def run(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
        return loss(net.head(torch.tanh(net.up(net.embed(ids)))), labels)

    parts = {"embed": nn.Embedding(WORDS, WIDTH), "up": nn.Linear(WIDTH, WIDTH)}
    return Block(run, **parts, head=nn.Linear(WIDTH, WORDS, bias=False))


class Judged(nn.Module):
    """Takes its batch by name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.net(ids, labels)


def sequences(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (batch, LENGTH)), torch.randint(WORDS, (batch, LENGTH))


@functools.cache
def case(loss: Callable[[Tensor, Tensor], Tensor], batch: int) -> tuple[Built, Graph]:
    make = lambda: network(loss).double()  # noqa: E731
    net = Net(make, lambda: sequences(batch), tuple, None, OptimizerSpec("sgd", lr=0.1)).build()
    graph = untangle(functionalize(captured(net).graph))
    return net, with_lean_cross_entropy(with_flat_rows(with_short_rows(graph)))


def last_head(graph: Graph) -> RecomputedHead | None:
    return next((found for value, _ in heads(graph) if (found := recomputed_head(graph, value))), None)


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("loss", TWICE, ids=lambda loss: loss.__name__)
def test_the_head_runs_twice_with_the_same_numbers(loss: Callable[[Tensor, Tensor], Tensor], batch: int) -> None:
    net, graph = case(loss, batch)
    found = last_head(graph)
    assert found is not None
    verify(found.graph)
    verify_fission(found.graph, graph)
    work = work_of(graph, COSTS, reuse=True)
    expected = history(graph_step(graph, net), 2)
    levels = list(levels_at(work, 0))
    for _, here in (levels[0], levels[-1]):
        looped = with_loops_in_place(here.compiled.graph, COSTS)
        verify(looped)
        verify_fission(looped, graph)
        assert sum(op.body is not None for op in looped.ops) == 2
        for their, our in zip(expected, history(graph_step(looped, net), 2), strict=True):
            for key, tensor in their.items():
                torch.testing.assert_close(our[key], tensor, rtol=1e-10, atol=1e-12)
        _, peak, _ = observed(graph_step(looped, net), looped.persistent_bytes())
        assert peak == replay(looped, workspaces().of(looped)).peak_bytes
    whole = [op for op in looped.ops for v in op.made() if looped.values[v].shape == (batch * (LENGTH - 1), WORDS)]
    assert not whole


@pytest.mark.parametrize("passes", [2, 3])
def test_the_heads_of_several_passes_run_twice_with_the_same_numbers(passes: int) -> None:
    """Each has rows of its own; its gradients are computed where its pass is undone, last pass first."""

    def likelihood(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
        log = net.head(torch.tanh(net.up(net.embed(ids))))[:, :-1].log_softmax(-1)
        return log.gather(-1, labels[:, 1:, None]).sum()

    def run(net: Block, *data: Tensor) -> Tensor:
        each = (likelihood(net, *its) for its in zip(*(some.split(1) for some in data), strict=True))
        return -(torch.stack([*each]) / LENGTH).log_softmax(0)[0]

    def module() -> nn.Module:
        parts = {"embed": nn.Embedding(WORDS, WIDTH), "up": nn.Linear(WIDTH, WIDTH)}
        return Block(run, **parts, head=nn.Linear(WIDTH, WORDS, bias=False)).double()

    net = Net(module, lambda: sequences(passes), tuple, None, OptimizerSpec("sgd", lr=0.1)).build()
    graph = with_flat_rows(with_short_rows(untangle(functionalize(captured(net).graph))))
    ((_, here), *_) = levels_at(work_of(graph, COSTS, reuse=True), 0)
    looped = with_loops_in_place(here.compiled.graph, COSTS)
    verify(looped)
    verify_fission(looped, graph)
    assert [op.phase for op in looped.ops if op.body is not None] == ["forward"] * passes + ["backward"] * passes
    assert not [op for op in looped.ops for v in op.made() if looped.values[v].shape == (LENGTH - 1, WORDS)]
    backward = [op for op in looped.ops if op.phase == "backward"]
    loops = [at for at, op in enumerate(backward) if op.body is not None]
    undone = [at for at, op in enumerate(backward) if "tanh" in op.target]
    assert sorted([*loops, *undone])[::2] == loops
    for their, our in zip(*(history(graph_step(each, net), 2) for each in (graph, looped)), strict=True):
        for key, tensor in their.items():
            torch.testing.assert_close(our[key], tensor, rtol=1e-10, atol=1e-12)
    _, peak, _ = observed(graph_step(looped, net), looped.persistent_bytes())
    assert peak == replay(looped, workspaces().of(looped)).peak_bytes


@pytest.mark.parametrize("loss", [policy, plain, distilled, *SELECTED], ids=lambda loss: loss.__name__)
def test_a_loss_of_tokens_is_in_one_loop(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """With rows of several sequences as one matrix, two loops along these are tried as well."""
    _, graph = case(loss, 2)
    found = last_head(graph)
    assert found is None or found.in_few


@pytest.mark.parametrize("loss", [policy, plain, *SELECTED], ids=lambda loss: loss.__name__)
def test_the_tokens_of_one_sequence_are_in_one_loop(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Not the columns of the scores, which the forward of a sum of exponentials reads alone."""
    net, graph = case(loss, 1)
    work = work_of(graph, COSTS, reuse=True)
    assert work.graph is graph
    longest = max(range(len(work.places)), key=lambda number: len(work.places[number].cuts))
    ((_, here), *_) = levels_at(work, longest)
    looped = with_loops_in_place(here.compiled.graph, COSTS)
    verify_fission(looped, graph)
    assert not [v for op in looped.ops for v in op.made() if looped.values[v].shape[-2:] == (LENGTH - 1, WORDS)]
    for their, our in zip(*(history(graph_step(each, net), 2) for each in (graph, looped)), strict=True):
        for key, tensor in their.items():
            torch.testing.assert_close(our[key], tensor, rtol=1e-6, atol=1e-8)  # sums in float32


@pytest.mark.parametrize("loss", TWICE, ids=lambda loss: loss.__name__)
def test_a_step_is_planned_so_and_taken_up_from_a_file(loss: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, data = Judged(network(loss)), dict(zip(("ids", "labels"), sequences(4), strict=True))
    trained_as_planned(module, data, RATIO, tmp_path / "step.plan")


def test_a_batch_norm_waits_for_the_batch() -> None:
    """No loop goes through it; convolutions in front of it run in one loop, and again in another one."""
    net = Net(wide_convolution, rows(8, 4, 32, 32), labels(8, 4), F.cross_entropy).build()
    graph = untangle(functionalize(captured(net).graph))
    ((_, here), *_) = levels_at(work_of(graph, COSTS, reuse=True), 0)
    looped = with_loops_in_place(here.compiled.graph, COSTS)
    verify_fission(looped, graph)
    assert [op.body is not None for op in looped.ops].count(True) == 2
    for their, our in zip(*(history(graph_step(each, net), 2) for each in (graph, looped)), strict=True):
        for key, tensor in their.items():
            torch.testing.assert_close(our[key], tensor)
    _, peak, _ = observed(graph_step(looped, net), looped.persistent_bytes())
    assert peak == replay(looped, workspaces().of(looped)).peak_bytes
    assert peak < 0.6 * replay(graph, workspaces().of(graph)).peak_bytes


@pytest.mark.parametrize("tracked", [False, True])
def test_running_statistics_are_written_once(tracked: bool) -> None:
    """Cut along its channels, a batch norm could run twice."""

    def run(net: Block, x: Tensor, y: Tensor) -> Tensor:
        return (net.norm(net.up(x)).tanh() - y).square().mean().sqrt()

    def module() -> nn.Module:
        return Block(run, up=nn.Linear(16, 256), norm=nn.BatchNorm1d(256, track_running_stats=tracked))

    net = Net(module, lambda: (torch.randn(8, 16), torch.randn(8, 256)), tuple, None, OptimizerSpec("sgd")).build()
    found = last_head(untangle(functionalize(captured(net).graph)))
    assert found is not None
    verify(found.graph)
    norms = [op for op in found.graph.ops if op.phase == "forward" and "batch_norm" in op.target]
    assert len(norms) == (1 if tracked else 2)


GRAMS = {
    "of the scores": lambda y, _: torch.bmm(y.transpose(1, 2), y),
    "with the input": lambda y, x: torch.bmm(y.transpose(1, 2), x),
    "of slices": lambda y, _: torch.bmm(y[..., :32].transpose(1, 2), y[..., 32:]),
    "of the third of three": lambda y, _: torch.bmm(torch.tanh(y.chunk(4, -1)[0]).transpose(1, 2), y.chunk(4, -1)[3]),
}


@pytest.mark.parametrize("gram", GRAMS.values(), ids=GRAMS)
def test_views_that_the_backward_takes_are_of_the_second_computation(gram: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A product's gradients read transposed scores."""

    def run(net: Block, ids: Tensor) -> Tensor:
        x = net.embed(ids)
        return gram(net.up(x), x).square().mean().sqrt()

    module = lambda: Block(run, embed=nn.Embedding(8, 4), up=nn.Linear(4, 64)).double()  # noqa: E731
    net = Net(module, lambda: (torch.randint(8, (4, 32)),), tuple, None, OptimizerSpec("sgd", lr=0.1)).build()
    graph = untangle(functionalize(captured(net).graph))
    found = last_head(graph)
    assert found is not None
    verify(found.graph)
    verify_fission(found.graph, graph)
    for their, our in zip(*(history(graph_step(each, net), 2) for each in (graph, found.graph)), strict=True):
        for key, tensor in their.items():
            torch.testing.assert_close(our[key], tensor, rtol=1e-10, atol=1e-12)
    list(levels_at(work_of(graph, COSTS, reuse=True), 0))
