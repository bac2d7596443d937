"""Steps to plan with loops, small enough to be searched in a second or two, by the times of a roofline."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import nn

from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.graph import Graph
from magis.models import get
from magis.rewrite.functionalize import functionalize, untangle
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.driver import SearchResult, search
from magis.search.fission_pareto import FissionFront
from magis.search.loop_places import divided_front
from magis.simulate.compiled_problem import Compiled, compile_problem
from tests.api.nets import blocks
from tests.nets import Built, Net, as_built, labels, mlp, rows
from tests.oracles import captured

BUDGET = 300


@dataclass(frozen=True, eq=False)
class Step:
    """A step in the form that fission works on, and what it needs as it stands."""

    graph: Graph
    costs: RooflineCosts
    compiled: Compiled
    peak: int
    latency_ns: int

    def whole(self, goal: Objective) -> SearchResult:
        """The best plan without loops."""
        return search(
            self.compiled.problem,
            goal,
            budget=BUDGET,
            seed=0,
        )


def wide_convolution() -> nn.Module:
    """Its peak is the backward of the second convolution."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 3, padding=1), nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


def _built(name: str) -> Built:
    if name == "perceptron":
        return Net(mlp(), rows(64, 12), labels(64, 5), F.cross_entropy).build()
    if name == "convolution":
        return Net(wide_convolution, rows(8, 4, 32, 32), labels(8, 4), F.cross_entropy).build()
    if name == "one row":
        return Net(mlp(), rows(1, 12), labels(1, 5), F.cross_entropy).build()
    return as_built(blocks() if name == "blocks" else get(name).build("small", 0))


@functools.cache
def step(name: str) -> Step:
    """A step by name: one of those above, or a registered model."""
    graph = untangle(functionalize(captured(_built(name)).graph))
    costs = RooflineCosts(find_device("cpu", ""), None, {})
    compiled = compile_problem(graph, costs, reuse=True)
    free = search(compiled.problem, Objective(memory_limit=1 << 62), budget=1, seed=0)
    return Step(graph, costs, compiled, free.peak, free.latency_ns)


@functools.cache
def front_of(given: Step) -> FissionFront:
    """The front of the step cut into parts; the goal plays no part in it."""
    return divided_front(given.graph, given.costs, PlanRequest(Objective(memory_limit=0), 0, BUDGET), reuse=True)
