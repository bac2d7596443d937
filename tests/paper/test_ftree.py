"""The F-Tree: built of legal candidates, changed by four rules, turned into loops that compute the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from magis.extensions.paper.dgraph import scores
from magis.extensions.paper.ftree import (
    Analysis,
    FTree,
    Mutation,
    arranged,
    disable,
    enable,
    hottest_nodes,
    least_divisor,
    lift,
    mutate,
    mutations,
)
from magis.extensions.paper.nested_loops import loops_for_tree
from magis.fission.region import Region, region_problems
from magis.graph import Graph
from magis.graph.hazards import lifetimes
from magis.simulate.simulator import replay
from tests.fission.cutout import check_same, leaving, loops, stand_alone
from tests.fission.draws import NETWORKS, normal
from tests.golden.golden import check_golden
from tests.paper.trees import describe, learner, problems, random_graph

HOT = {4: 384, 5: 384}
"""Both activations of the learner."""


def hot_spots(graph: Graph) -> dict[int, int]:
    """Bytes of the temporary storages alive at the peak, in program order and without workspaces."""
    profile = replay(graph, lambda op, values: 0)
    lives = lifetimes(graph)
    at = profile.peak_position
    return {
        storage: graph.storages[storage].nbytes
        for storage, born in lives.born.items()
        if graph.storages[storage].kind == "temporary" and born <= at <= lives.dies[storage]
    }


# --- building ---------------------------------------------------------------------------------------------------------


def test_the_tree_of_a_learner() -> None:
    """All rows of the step, and below it what the first product dominates, at half the heat; nothing along the hidden
    units, since the second product ends them."""
    graph = learner()
    tree = Analysis(graph).tree(HOT)
    assert [node.positions for node in tree.nodes] == [(0, 1, 2, 4, 5, 6, 7), (1, 2, 4, 5)]
    assert tree.parents == (-1, 0)
    assert [node.extent for node in tree.nodes] == [6, 6]
    check_golden("ftree_learner.txt", describe(tree, graph))


@pytest.mark.parametrize("seed", range(40))
def test_levels_by_definition(seed: int) -> None:
    """Per level the nodes with a score in its range of which no descendant is one."""
    graph = random_graph(seed)
    analysis = Analysis(graph)
    hot = hot_spots(graph)
    for tree in analysis.trees:
        score = scores(graph, tree, hot).tolist()
        most = max(score)
        expected = []
        for level in range(1, 5) if most > 0 else ():
            within = [n for n, mine in enumerate(score) if level / 4 <= mine / most < (level + 1) / 4]
            below = {n: {tree.positions.index(p) + 1 for p in tree.below(n)} for n in within}
            expected += [n for n in within if not below[n] & set(within)]
        assert hottest_nodes(graph, tree, hot, 4) == expected


@functools.cache
def network(name: str) -> tuple[Analysis, FTree]:
    """The forward and backward pass of a network, and its F-Tree."""
    graph, _ = normal(name)
    kept = [position for position, op in enumerate(graph.ops) if op.phase != "update"]
    alone = stand_alone(graph, kept, leaving(graph, kept))
    analysis = Analysis(alone)
    return analysis, analysis.tree(hot_spots(alone))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_node_of_a_network_is_legal(name: str) -> None:
    analysis, tree = network(name)
    assert tree.nodes
    assert list(problems(tree)) == []
    for node in tree.nodes:
        for parts in {least_divisor(node.extent), node.extent}:
            assert list(region_problems(analysis.graph, Region(node.cuts, parts))) == []


# --- mutations --------------------------------------------------------------------------------------------------------


def three_levels() -> tuple[Graph, FTree]:
    """The learner's tree with a further candidate inside."""
    graph = learner()
    tree = Analysis(graph).tree(HOT)
    inner = tree.nodes[1]
    cuts = {position: inner.cuts[position] for position in (2, 4)}
    return graph, arranged([*tree.nodes, replace(inner, positions=(2, 4), cuts=cuts)])


RULES: dict[str, tuple[Callable[[FTree], Iterator[Mutation]], dict[int, int]]] = {
    "enable": (enable, {1: 2}),
    "lift": (lift, {2: 3}),
    "disable": (disable, {0: 2, 1: 3}),
    "mutate": (mutate, {1: 2}),
}


@pytest.mark.parametrize("name", RULES)
def test_a_mutation_as_a_reader_sees_it(name: str) -> None:
    graph, tree = three_levels()
    rule, parts = RULES[name]
    before = tree.with_parts(parts)
    assert list(problems(before)) == []
    text = [f"# before\n{describe(before, graph)}"]
    text += [f"# {found.name}\n{describe(found.tree, graph)}" for found in rule(before)]
    check_golden(f"ftree_{name}.txt", "\n".join(text))


def back(tree: FTree) -> FTree:
    """With everything disabled, one node after another."""
    return back(next(disable(tree)).tree) if tree.enabled() else tree


@pytest.mark.parametrize("seed", range(30))
def test_mutations_keep_the_rules_and_can_be_taken_back(seed: int) -> None:
    """Whatever is reached by mutations is a tree, and disabling leads back to the first one."""
    graph = random_graph(seed)
    first = Analysis(graph).tree(hot_spots(graph))
    layer = [first]
    for _ in range(3):
        layer = [found.tree for tree in layer for found in mutations(tree)][:40]
        for tree in layer:
            assert list(problems(tree)) == []
            assert tree.parents == first.parents
            assert back(tree) == first


# --- loops ------------------------------------------------------------------------------------------------------------


def check(graph: Graph, tree: FTree, count: int) -> None:
    """The loops are sound, proven, compute the same, and take the bytes that are said."""
    found = loops_for_tree(graph, tree)
    assert len(loops(found)) == count == len(tree.enabled())
    check_same(graph, found)


@pytest.mark.parametrize("parts", [{0: 2}, {1: 3}, {2: 6}, {0: 2, 1: 3}, {0: 3, 2: 2}, {1: 2, 2: 3}])
def test_enabled_trees_compute_the_same(parts: dict[int, int]) -> None:
    graph, tree = three_levels()
    check(graph, tree.with_parts(parts), len(parts))


@pytest.mark.parametrize("name", ["seed-vit", "seed-unetpp", "gpt_neo"])
def test_enabled_trees_of_networks_compute_the_same(name: str) -> None:
    """The leaf in two parts; and, where it has a parent along the same axis, both nested."""
    analysis, tree = network(name)
    leaf = max((i for i in range(len(tree.nodes)) if not tree.children(i)), key=lambda i: len(tree.nodes[i].positions))
    check(analysis.graph, tree.with_parts({leaf: least_divisor(tree.nodes[leaf].extent)}), 1)
