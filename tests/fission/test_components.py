"""Axes from the D-Graph: one sequence is cut along its tokens, merged rows anywhere, and loops hold loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.fission.candidates import components
from magis.fission.loss_suffix import pieces
from magis.fission.proof import verify_fission
from magis.fission.region import most_parts, ways
from magis.graph import Graph, every_op, verify
from magis.rewrite.functionalize import functionalize, untangle
from magis.search.fission_pareto import levels_at, work_of
from magis.simulate.simulator import replay
from tests.nets import ADAMW, NETS, Block, Built, Net
from tests.oracles import captured, eager_step, graph_step, history, observed, workspaces

WORDS, WIDTH, LENGTH = 96, 16, 128
COSTS = RooflineCosts(find_device("cpu", ""), None, {})


def decoder(run: Callable[[Block, Tensor, Tensor], Tensor], rows: int = 1) -> Net:
    """A block of attention, a head, and a loss within the module, on sequences of 128 tokens; in float64."""
    made = functools.partial(nn.Linear, bias=False, dtype=torch.float64)

    def module() -> nn.Module:
        return Block(
            run, embed=nn.Embedding(WORDS, WIDTH, dtype=torch.float64), qkv=made(WIDTH, 3 * WIDTH),
            up=made(WIDTH, 4 * WIDTH), down=made(4 * WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH, dtype=torch.float64),
            head=made(WIDTH, WORDS), teacher=made(WIDTH, WORDS).requires_grad_(requires_grad=False),
        )  # fmt: skip

    return Net(module, lambda: (torch.randint(WORDS, (rows, LENGTH)), torch.randint(WORDS, (rows, LENGTH))),
               loss_fn=None, rule=ADAMW)  # fmt: skip


def hidden(net: Block, ids: Tensor) -> Tensor:
    """The hidden states of a decoder, (batch, token, feature)."""
    x = net.embed(ids)
    q, k, v = net.qkv(net.norm(x)).view(*ids.shape, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    x = x + mixed.reshape(*ids.shape, WIDTH)
    added: Tensor = x + net.down(F.silu(net.up(x)))
    return added


def shifted(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return F.cross_entropy(net.head(hidden(net, ids)).float().view(-1, WORDS), targets)


def smoothed(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
    scores = net.head(hidden(net, ids)).view(-1, WORDS)
    return F.cross_entropy(scores, labels.view(-1), label_smoothing=0.1)


def soft_capped(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
    scores = (net.head(hidden(net, ids)) / 30).tanh() * 30
    return F.cross_entropy(scores.view(-1, WORDS), labels.view(-1))


def gathered(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of the labels, averaged over a mask, as policies are trained."""
    mask = (labels > 9).double()
    chosen = net.head(hidden(net, ids)).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return -(chosen * mask).sum() / mask.sum()


def cut_off(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
    """Scores of all tokens but the last: 99 rows, which have odd numbers of equal parts alone."""
    scores = net.head(hidden(net, ids[:, :100]))[:, :-1].reshape(-1, WORDS)
    return F.cross_entropy(scores, labels[:, 1:100].reshape(-1))


def distilled(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
    x = hidden(net, ids)
    known, found = net.teacher(x.detach()).log_softmax(-1), net.head(x).log_softmax(-1)
    return F.kl_div(found, known, log_target=True, reduction="sum") / labels.numel()


LOSSES = {each.__name__: each for each in (shifted, smoothed, soft_capped, gathered, cut_off, distilled)}


@functools.cache
def step(name: str, rows: int = 1) -> tuple[Built, Graph]:
    net = (decoder(LOSSES[name], rows) if name in LOSSES else NETS[name]).build()
    return net, untangle(functionalize(captured(net).graph))


def ties(graph: Graph, least: int) -> Iterator[list[tuple[int, int]]]:
    """Dimensions of tensors that a call cuts together."""
    for op in graph.ops:
        for split in () if op.random or op.phase == "update" else ways(op, graph.values):
            pairs = zip((*op.inputs(), *op.outputs), (*split.inputs, *split.outputs), strict=True)
            if split.extent % least == 0:
                yield [(value, how) for value, how in pairs if value is not None and isinstance(how, int)]


@pytest.mark.parametrize("name", [*LOSSES, "tied", "attention", "conv-group-norm"])
def test_components_are_those_of_the_definition(name: str) -> None:
    """Two dimensions are of one component where calls tie them, directly or through others."""
    _, graph = step(name)
    for least in (1, 4):
        parent: dict[tuple[int, int], tuple[int, int]] = {}

        def root(vertex: tuple[int, int], parent: dict[tuple[int, int], tuple[int, int]] = parent) -> tuple[int, int]:
            while parent.setdefault(vertex, vertex) != vertex:
                vertex = parent[vertex]
            return vertex

        for tied in ties(graph, least):
            for vertex in tied:
                parent[root(vertex)] = root(tied[0])
        for axis in components(graph, least):
            assert len({root(vertex) for vertex in axis.dims.items()}) == 1
            assert most_parts(axis.cuts) % least == 0
            for position, split in axis.cuts.items():
                for value, how in zip(graph.ops[position].inputs(), split.inputs, strict=True):
                    assert not isinstance(how, int) or axis.dims[value] == how


def wide_outside(graph: Graph, inside: Collection[int], size: int) -> bool:
    """Whether a call outside of a region takes or makes a tensor of so many elements."""
    touched = {value for p, op in enumerate(graph.ops) if p not in inside for value in (*op.inputs(), *op.made())}
    return any(graph.values[v].numel == size <= graph.storages[graph.values[v].storage].nbytes for v in touched)


@pytest.mark.parametrize("name", LOSSES)
def test_the_head_of_one_sequence_is_cut_to_the_loss_and_back(name: str) -> None:
    """Tensors over all words exist in parts alone."""
    _, graph = step(name)
    assert any(not wide_outside(graph, piece.cuts, LENGTH * WORDS) for piece in pieces(graph))


@pytest.mark.parametrize("name", LOSSES)
def test_the_head_of_two_sequences_is_cut_into_many_parts(name: str) -> None:
    """By rows of both sequences where they are merged, else by a loop over sequences and one over tokens inside."""
    _, graph = step(name, 2)
    work = work_of(graph, COSTS, reuse=True)
    largest = []
    for number, place in enumerate(work.places):
        for cut, level in levels_at(work, number):
            if cut.parts * cut.inner >= 8 and not wide_outside(graph, place.cuts, 2 * LENGTH * WORDS):
                bodies = [op.body.graph for op, _ in every_op(level.compiled.graph) if op.body is not None]
                own = [s.nbytes for body in bodies for s in body.storages.values() if s.kind == "temporary"]
                largest.append(max(own))
    assert min(largest) <= 2 * LENGTH * WORDS * 8 // 8


@pytest.mark.parametrize("name", ["shifted", "gathered"])
def test_totals_of_the_targets_are_in_no_region(name: str) -> None:
    _, graph = step(name)
    data = {value for value in graph.inputs if graph.values[value].name.startswith("input:")}
    for op in graph.ops:  # what the labels alone decide
        if op.phase == "forward" and op.inputs() and data.issuperset(op.inputs()):
            data.update(op.made())
    totals = [p for p, op in enumerate(graph.ops) if op.target.startswith("aten.sum") and data.issuperset(op.inputs())]
    assert totals
    assert not any(position in piece.cuts for piece in pieces(graph) for position in totals)


@pytest.mark.parametrize("name", LOSSES)
def test_loops_in_loops_compute_the_step_in_the_bytes_that_are_simulated(name: str) -> None:
    net, graph = step(name)
    work = work_of(graph, COSTS, reuse=True)
    expected = history(eager_step(net), 2)
    nested = 0
    for number in range(len(work.places)):
        levels = [each for each in levels_at(work, number) if each[0].inner > 1]
        for _, level in levels[:1]:
            looped = level.compiled.graph
            verify(looped)
            verify_fission(looped, graph)
            nested += sum(op.body is not None for op, _ in every_op(looped)) == 2
            found, peak, _ = observed(graph_step(looped, net), looped.persistent_bytes())
            workspaces().learn(looped)
            assert peak == replay(looped, workspaces().of(looped)).peak_bytes
            for their, ours in zip(expected, found, strict=True):
                for key, tensor in their.items():
                    rtol = 1e-9 if tensor.dtype == torch.float64 else 1e-6
                    torch.testing.assert_close(ours[key], tensor, rtol=rtol, atol=1e-12)
    assert nested or name == "cut_off"  # 33 rows of a part have no even parts
