"""Rules one after another at random places of training steps: still eager's numbers, still the simulated bytes."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import Tensor, nn

from magis.extensions.models.building import Style
from magis.extensions.models.encoders import bert
from magis.extensions.paper.interim_rules import RULES
from magis.graph import Graph, verify
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.rule_table import Match, attempt
from tests.nets import ADAMW, SGD, Built, Net, as_built, rows
from tests.oracles import captured, eager_step, history
from tests.rewrite.alike import check_training
from tests.rewrite.cases import TINY_BERT, batches
from tests.rewrite.test_rules_merged import heads

LENGTH = 12


class Branches(nn.Module):
    """Convolutions of one image and of several, concatenations, pieces, products of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.plain, self.other = (nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(2))
        self.shared = nn.Conv2d(3, 2, 1, bias=False)
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([torch.relu(self.wide(x)), torch.relu(self.narrow(x))], 1)
        first, second = torch.split(joined, [3, 3], 1)
        parts = torch.cat([torch.sigmoid(first) * second, second * torch.sigmoid(second)], 1)
        images = self.shared(self.plain(x)) + self.shared(self.other(x)) * 0.5
        halves = torch.split(parts, [2, 4], 1)
        mixed = torch.cat([torch.tanh(half) for half in halves], 1)
        row = torch.cat([mixed.mean((2, 3)), images.mean((2, 3))], 1)
        square = (row.t() @ row) * 0.25
        left, right = self.up(self.down(row)), row @ (square + square.t())
        return (self.down(left + right) + self.down(row * left)).sum(1)


def branches() -> Built:
    return Net(
        lambda: Branches().double(), rows(4, 3, 5, 5, dtype=torch.float64), rows(4, dtype=torch.float64), rule=ADAMW
    ).build()


NETS = {
    "branches": branches,
    "heads": heads(ADAMW).build,
    "heads without bias": heads(SGD, bias=False).build,
    "tiny-bert": lambda: as_built(bert(TINY_BERT, Style(seed=False), "bert", 0).to("float64")),
}


@functools.cache
def start(name: str) -> tuple[Built, Graph, list[dict[str, Tensor]]]:
    """A network, its graph, and what eager leaves behind."""
    built = NETS[name]()
    return built, untangle(functionalize(captured(built).graph)), history(eager_step(built), 2)


def walk(graph: Graph, seed: int) -> tuple[Graph, list[str]]:
    """The graph after some rules at drawn places, and their names."""
    drawn = random.Random(seed)
    names = []
    while len(names) < LENGTH:
        index = Index(graph)
        places = [Match(each, bound) for each in RULES for bound in each.occurrences(index)]
        drawn.shuffle(places)
        # rare rules as often as common ones
        places.sort(key=lambda match: names.count(match.rule.name))
        found = next(((m.rule.name, g) for m in places if (g := attempt(graph, m)) is not None), None)
        if found is None:
            break
        names.append(found[0])
        graph = found[1]
        verify(graph)
    return graph, names


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("seeds", batches(3, 25, 103))
def test_walks(name: str, seeds: range) -> None:
    built, before, expected = start(name)
    for seed in seeds:
        graph, names = walk(before, seed)
        assert names
        check_training(graph, built, expected, rtol=1e-6, atol=1e-8, about=f"{names}")
