"""Where a step is cut: the pieces that hold most come first, those that hold next to nothing are left out."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from magis.fission.candidates import connected, numbers_of_parts
from magis.fission.loss_suffix import axes, heaviest, own_bytes, pieces, places, suffix
from magis.fission.region import most_parts
from magis.graph import Graph
from magis.graph.hazards import dependency_graph
from magis.rewrite.functionalize import functionalize, untangle
from tests.nets import ADAMW, Net, labels, rows
from tests.oracles import captured


def alive(graph: Graph, members: set[int], position: int) -> int:
    """Bytes alive at a position of temporary storages that only the members touch, by definition."""
    total = 0
    for storage in graph.storages.values():
        touched = [
            place
            for place, op in enumerate(graph.ops)
            if any(graph.values[value].storage == storage.id for value in (*op.inputs(), *op.made()))
        ]
        returned = any(graph.values[value].storage == storage.id for value in graph.outputs)
        mine = bool(touched) and set(touched) <= members and not returned
        if mine and storage.kind == "temporary" and touched[0] <= position <= touched[-1]:
            total += storage.nbytes
    return total


@pytest.fixture(scope="module")
def dropped() -> Graph:
    """A block with dropout, which no cut runs through, and a wide head."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.head = nn.Linear(8, 512)

        def forward(self, x: Tensor) -> Tensor:
            x = x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.5, training=True)
            return torch.logsumexp(self.head(x), 1)

    net = Net(Classifier, rows(16, 8, dtype=torch.float32), rows(16, dtype=torch.float32), rule=ADAMW)
    return untangle(functionalize(captured(net.build()).graph))


@pytest.mark.parametrize("seed", range(8))
def test_own_bytes_are_those_of_the_definition(dropped: Graph, seed: int) -> None:
    chosen = random.Random(seed)
    owner = {position: chosen.randrange(3) for position in range(len(dropped.ops)) if chosen.random() < 0.9}
    found = own_bytes(dropped, owner, 3)
    for number in range(3):
        members = {position for position, each in owner.items() if each == number}
        assert found[number] == max(alive(dropped, members, position) for position in range(len(dropped.ops)))


def test_the_head_is_found_behind_a_dropout(dropped: Graph) -> None:
    first, *_ = found = pieces(dropped)
    assert any(dropped.ops[position].module == "head" for position in first.cuts)
    assert any(dropped.ops[position].phase == "backward" for position in first.cuts)
    held = [piece.nbytes for piece in found]
    assert held == sorted(held, reverse=True)
    assert len({tuple(sorted(piece.cuts)) for piece in found}) == len(found)
    assert all(piece.at == min(piece.cuts) for piece in found)


def test_the_heaviest_is_one_of_the_connected_ones(dropped: Graph) -> None:
    (axis,) = axes(dropped)
    dag = dependency_graph(dropped)
    for at in places(dropped, axis, 8):
        cuts = suffix(dropped, axis, at)
        regions = connected(dropped, cuts, dag)
        best = heaviest(dropped, cuts, dag)
        assert (best is None) == (not regions)
        if best is not None:
            held = [own_bytes(dropped, dict.fromkeys(region, 0), 1)[0] for region in regions]
            assert best.nbytes == max(held)
            assert best.cuts == regions[held.index(best.nbytes)]


def test_one_picture_is_cut_along_either_side() -> None:
    net = Net(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.GELU(), nn.Conv2d(8, 8, 1), nn.Tanh(), nn.Conv2d(8, 2, 1)),
        rows(1, 3, 7, 32, dtype=torch.float32),
        rows(1, 2, 7, 32, dtype=torch.float32),
        rule=ADAMW,
    )
    graph = untangle(functionalize(captured(net.build()).graph))
    numbers = {tuple(numbers_of_parts(most_parts(piece.cuts))) for piece in pieces(graph)}
    assert {(7,), (2, 4, 8, 16, 32)} <= numbers


def test_features_of_data_by_constants_join_a_piece() -> None:
    """A product with a buffer sums along another axis than the batch: only totals along the cut axis stay aside."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("projection", torch.randn(8, 64))
            self.head = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cos(x @ self.projection))

    net = Net(Features, rows(32, 8, dtype=torch.float32), labels(32, 4), nn.functional.cross_entropy, rule=ADAMW)
    graph = untangle(functionalize(captured(net.build()).graph))
    largest = pieces(graph)[0]
    names = {graph.ops[position].target.split(".")[1] for position in largest.cuts}
    assert {"mm", "cos", "nll_loss_forward", "nll_loss_backward"} <= names
    assert "ne" not in names  # the number of targets, which the backward divides by


def test_a_mean_of_squares_and_its_gradient_are_one_piece() -> None:
    wide = {"dtype": torch.float32}
    net = Net(
        lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), rows(32, 8, **wide), rows(32, 8, **wide),
        rule=ADAMW,
    )  # fmt: skip
    graph = untangle(functionalize(captured(net.build()).graph))
    calls = [graph.ops[position] for position in pieces(graph)[0].cuts]
    assert {"sub", "mean", "gelu", "gelu_backward"} <= {op.target.split(".")[1] for op in calls}
    assert {"0", "2"} <= {op.module for op in calls if op.target == "aten.mm.default" and op.phase == "backward"}


def test_log_probabilities_of_one_sequence_and_their_gradient_are_one_piece() -> None:
    """The backward of `gather` begins with `new_zeros` of the gradient, which only lends its type."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 128)

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            return self.head(x).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)

    def drawn() -> tuple[Tensor, ...]:
        return torch.randn(1, 32, 8), torch.randint(128, (1, 32))

    net = Net(Policy, drawn, rows(1, 32, dtype=torch.float32), lambda found, old: (found - old).exp().mean(), ADAMW)
    graph = untangle(functionalize(captured(net.build()).graph))
    largest = pieces(graph)[0]
    names = {graph.ops[position].target.split(".")[1] for position in largest.cuts}
    assert {"_log_softmax", "gather", "full", "_log_softmax_backward_data"} <= names


def test_slight_pieces_along_a_component_are_left_to_loops_at_the_peak() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(512, 16), nn.Linear(16 * 32, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.tokens(tokens)).flatten(1))

    net = Net(Embedded, lambda: (torch.randint(512, (1, 32)),), rows(1, 16, dtype=torch.float32), rule=ADAMW)
    assert pieces(untangle(functionalize(captured(net.build()).graph))) == []
