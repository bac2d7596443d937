"""The D-Graph and the dominator trees: by hand on a small step, by brute force on random ones."""

from __future__ import annotations

import pytest

from magis.extensions.paper.dgraph import (
    components,
    depends_on_inputs,
    dominators,
    flow,
    scores,
)
from tests.fission.rows import step
from tests.paper.trees import axes, learner, random_graph, reached, score, strictly_dominated

SEEDS = range(60)


def test_the_axes_of_a_learner() -> None:
    """Rows of the batch, inner of the first product, hidden units, outputs; each reduced where it ends."""
    graph = learner()
    found = {
        frozenset((v.kind, v.of, v.number if v.kind == "dim" else -1) for v in each.vertices)
        for each in components(graph)
    }
    expected = [
        ([(1, 0), (4, 0), (5, 0), (6, 0), (8, 0), (9, 0), (10, 1)], [7]),
        ([(1, 1), (2, 0), (10, 0), (11, 0)], [0]),
        ([(2, 1), (3, 0), (4, 1), (5, 1), (7, 1), (8, 1), (9, 1), (11, 1)], [2]),
        ([(3, 1), (6, 1), (7, 0)], [4]),
    ]
    assert found == {
        frozenset([*(("dim", v, d) for v, d in pairs), *(("axis", at, -1) for at in reduced)])
        for pairs, reduced in expected
    }


def test_an_operator_with_two_ways_along_one_axis_is_no_part_of_it() -> None:
    """A square tensor plus its transpose: rows and columns are one axis, along which nothing can be told apart."""
    graph = step(
        "storage 1 batch 128",
        "storage 2 temporary 128",
        "storage 3 temporary 128",
        "value 1 @1 float64 [4, 4] {4, 1} +0",
        "value 2 @1 float64 [4, 4] {1, 4} +0",
        "value 3 @2 float64 [4, 4] {4, 1} +0",
        "value 4 @3 float64 [4, 4] {4, 1} +0",
        "input 1",
        "op 0 %2 = aten.t.default(%1) phase forward",
        "op 1 %3 = aten.add.Tensor(%1, %2) reads 1:0 phase forward",
        "op 2 %4 = aten.relu.default(%3) reads 2:0 phase forward",
        "output 4",
    )
    (axis,) = components(graph)
    assert axis.cuts == {}
    assert len(axis.vertices) == 8


@pytest.mark.parametrize("seed", SEEDS)
def test_components_by_brute_force(seed: int) -> None:
    graph = random_graph(seed)
    assert {each.vertices for each in components(graph)} == axes(graph)


@pytest.mark.parametrize("seed", SEEDS)
def test_dominators_and_scores_by_brute_force(seed: int) -> None:
    graph = random_graph(seed)
    fed = depends_on_inputs(graph)
    temporary = [s.id for s in graph.storages.values() if s.kind == "temporary"]
    hot = {storage: graph.storages[storage].nbytes for storage in temporary[seed % 3 :: 2]}
    for each in components(graph):
        tree = dominators(graph, each.cuts, fed)
        edges = flow(graph, each.cuts, fed)
        assert set(tree.positions) == reached(edges) - {-1}
        expected = strictly_dominated(edges)
        found = scores(graph, tree, hot).tolist()
        for node, position in enumerate((-1, *tree.positions)):
            assert set(tree.below(node)) == expected[position]
            assert found[node] == score(graph, expected[position], hot, tree.positions)
