"""Regions that break a rule are refused with a reason, one line, and by nothing else."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from magis.errors import VerifyError
from magis.fission.expand import _order, expand
from magis.fission.region import Region, region_problems
from magis.graph import Graph
from magis.graph.hazards import dependency_graph
from magis.models import resolve
from tests.fission.draws import NETWORKS, normal, regions
from tests.fission.mistakes import MISTAKES

PER_NETWORK = 12
MANY = 36


def refused(graph: Graph, region: Region) -> str:
    """The reason with which the region is refused."""
    reasons = list(region_problems(graph, region))
    assert reasons
    assert all(len(reason.splitlines()) == 1 for reason in reasons)
    with pytest.raises(VerifyError) as caught:
        expand(graph, region)
    assert str(caught.value) == " ".join(reasons[0].split())
    return reasons[0]


def mistaken(name: str, seeds: range) -> Counter[str]:
    """One illegal region per seed, the kinds of mistakes in turns; returns how many of each kind there were."""
    graph, dag = normal(name)
    found: Counter[str] = Counter()
    kinds = list(MISTAKES)
    for seed in seeds:
        chosen = random.Random(f"{name} {seed}")
        for at in range(len(kinds)):
            kind = kinds[(seed + at) % len(kinds)]
            legal = (region for region in regions(graph, dag, chosen, 30) if not list(region_problems(graph, region)))
            wrong = next((w for w in (MISTAKES[kind](graph, dag, region, chosen) for region in legal) if w), None)
            if wrong is not None:
                refused(graph, wrong)
                found[kind] += 1
                break
    return found


@pytest.mark.parametrize("name", resolve(["seed"]))
def test_illegal_regions_are_refused(name: str) -> None:
    found = mistaken(name, range(PER_NETWORK))
    assert found.total() == PER_NETWORK
    assert len(found) >= 9


@pytest.mark.soak
@pytest.mark.parametrize("name", NETWORKS)
def test_many_illegal_regions_are_refused(name: str) -> None:
    """Together 504."""
    assert mistaken(name, range(100, 100 + MANY)).total() == MANY


def test_a_region_that_would_need_its_own_results_has_no_order() -> None:
    """Whoever expands a region has checked it before; an order of fewer operators must not come of it all the same."""
    graph, _ = normal("seed-unet")
    dag = dependency_graph(graph)
    first, last = next(
        (first, last)
        for first in dag.node_indices()
        for between in dag.successor_indices(first)
        for last in dag.successor_indices(between)
        if last not in dag.successor_indices(first)
    )
    with pytest.raises(VerifyError, match="its loop would need its own results"):
        _order(graph, {first, last}, {first, last}, graph.ops[first])
