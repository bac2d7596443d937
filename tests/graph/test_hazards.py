"""Order constraints: enough of them (no legal order changes a number), and none too many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import rustworkx as rx
import torch
from hypothesis import given
from hypothesis import strategies as st

from magis.errors import VerifyError
from magis.graph import GENERATOR, Graph, Op, Ref, Storage, Value, verify
from magis.graph.hazards import dependency_graph, is_pure_view, order_edges
from magis.graph.verify import problems
from tests.nets import NETS, Net
from tests.oracles import captured, interpret, same
from tests.strategies import adversarial_orders, examples, programs, reordered, schedules, topological


def conflicts(graph: Graph) -> set[tuple[int, int]]:
    """Pairs of positions that touch the same storage, one of them writing; and values before their readers.

    Who reads is told by the versions that an operator meets: views look at no data.
    """
    found = set()
    for late, op in enumerate(graph.ops):
        for early, other in enumerate(graph.ops[:late]):
            written, read = {s for s, _ in op.writes}, {s for s, _ in op.reads}
            before, seen = {s for s, _ in other.writes}, {s for s, _ in other.reads}
            if written & (before | seen) or before & (written | read) or set(op.inputs()) & set(other.made()):
                found.add((early, late))
    return found


@given(schedules(14))
def test_the_constraints_are_the_conflicts(graph: Graph) -> None:
    """Against all pairs: the same pairs are ordered, directly or through others."""
    pairs: rx.PyDiGraph[int, None] = rx.PyDiGraph()
    pairs.add_nodes_from(range(len(graph.ops)))
    pairs.add_edges_from([(a, b, None) for a, b in conflicts(graph)])
    dag = dependency_graph(graph)
    for node in dag.node_indices():
        assert rx.descendants(dag, node) == rx.descendants(pairs, node)


@given(schedules(14), st.integers(0, 2**32 - 1))
def test_every_legal_order_is_sound(graph: Graph, seed: int) -> None:
    for order in adversarial_orders(graph, seed):
        assert sorted(order) == list(range(len(graph.ops)))
        assert list(problems(reordered(graph, order))) == []


def broken_orders(graph: Graph, edges: list[tuple[int, int]]) -> list[tuple[tuple[int, int], list[int]]]:
    """Orders that keep every constraint but one of ``edges`` each, which they turn round."""
    found = []
    for early, late in edges:
        dag = dependency_graph(graph)
        dag.remove_edge(early, late)
        if not rx.has_path(dag, early, late):  # else others enforce it
            dag.add_edge(late, early, None)
            found.append(((early, late), topological(dag, lambda at: at)))
    return found


@given(schedules(12))
def test_turning_round_any_constraint_is_refused(graph: Graph) -> None:
    for edge, order in broken_orders(graph, order_edges(graph.ops)):
        assert list(problems(reordered(graph, order))), edge
    # data flow alone is guarded, too
    flow = [(a, b) for a, b in dependency_graph(graph).edge_list() if (a, b) not in order_edges(graph.ops)]
    for edge, order in broken_orders(graph, flow):
        assert list(problems(reordered(graph, order))), edge


@pytest.mark.parametrize(
    "name", ["batch-norm-twice", "slice-writes", "stale-views", "dropout", "buffers", "weight-writes"]
)
def test_turning_round_a_constraint_of_a_network_is_refused(name: str) -> None:
    graph = captured(NETS[name].build()).graph
    edges = order_edges(graph.ops)
    chosen = [edges[at] for at in np.random.default_rng(0).permutation(len(edges))[:25]]
    orders = broken_orders(graph, chosen)
    assert orders
    for _, order in orders:
        with pytest.raises(VerifyError):
            verify(reordered(graph, order))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("batch-norm-twice", "write-write"), ("slice-writes", "write-write"), ("slice-writes", "write-read"),
        ("stale-views", "read-write"),
    ],
)  # fmt: skip
def test_constraints_guard_numbers(name: str, kind: str) -> None:
    """Of each kind of hazard there is one whose violation shows in the numbers: the constraint is not for show."""
    net = NETS[name].build()
    graph = captured(net).graph
    expected = interpret(graph, net)
    wrong: list[str] = []
    for (early, late), order in broken_orders(graph, order_edges(graph.ops)):
        a, b = graph.ops[early], graph.ops[late]
        both = {s for s, _ in a.writes} & {s for s, _ in b.writes}
        found = "write-write" if both else "read-write" if b.writes else "write-read"
        flow = set(b.inputs()) & set(a.made())  # guarded twice
        if found == kind and not flow:
            seen = interpret(graph, net, order)
            wrong += [key for key in expected if not same(expected[key], seen[key])]
    assert wrong


@examples(60)
@given(programs(), st.integers(0, 2**32 - 1))
def test_programs_compute_the_same_in_every_legal_order(net: Net, seed: int) -> None:
    """Views made before and after writes through other views, and random numbers, on three storages."""
    built = net.build()
    graph = captured(built).graph
    expected = interpret(graph, built)
    with torch.no_grad():
        eager = net.build().module
        torch.manual_seed(0)
        outputs = eager(*built.inputs)
    unique = list({id(t): t for t in outputs}.values())
    for order in adversarial_orders(graph, seed):
        verify(reordered(graph, order))
        found = interpret(graph, built, order)
        assert [key for key in expected if not same(expected[key], found[key])] == []
    assert all(any(same(t, e) for e in expected.values()) for t in unique)


# --- views ------------------------------------------------------------------------------------------------------------

STORAGES = {GENERATOR: Storage(GENERATOR, 0, "generator"), 1: Storage(1, 8, "batch"), 2: Storage(2, 8, "temporary")}
VALUES = {n: Value(n, (2,), (1,), "float32", s) for n, s in ((1, 1), (2, 1), (3, 2))}
GRAPH = Graph(STORAGES, VALUES, (), (1,), ())


def test_a_pure_view_opens_a_window_and_nothing_else() -> None:
    view = Op(0, "aten.view.default", (Ref(1),), (), (2,))
    assert is_pure_view(GRAPH, view)
    assert is_pure_view(GRAPH, replace(view, outputs=(2, None, 2), many=True))
    assert not is_pure_view(GRAPH, replace(view, writes=((1, 1),)))
    assert not is_pure_view(GRAPH, replace(view, random=True))
    assert not is_pure_view(GRAPH, replace(view, outputs=(3,)))  # a fresh storage
    assert not is_pure_view(GRAPH, replace(view, outputs=(2, 3), many=True))
    assert not is_pure_view(GRAPH, replace(view, outputs=()))  # nothing made: magis.wait
    assert not is_pure_view(GRAPH, replace(view, args=()))  # made from nothing


def test_constraints_are_listed_once_in_order() -> None:
    op = Op(0, "f", (), (), ())
    ops = (
        replace(op, reads=((1, 0), (2, 0))),
        replace(op, reads=((1, 0), (2, 0)), writes=((1, 1), (2, 1))),
        replace(op, reads=((1, 1), (2, 1))),
        replace(op, reads=((1, 1),), writes=((1, 2),)),
        replace(op, writes=((1, 3),)),
        replace(op, reads=((3, 0),)),
    )
    assert order_edges(ops) == [(0, 1), (1, 2), (1, 3), (2, 3), (3, 4)]


def test_the_graph_of_constraints_has_data_flow_and_versions() -> None:
    ops = (
        Op(0, "f", (Ref(1),), (), (3,), reads=((1, 0),)),
        Op(1, "g", ((Ref(3), 1),), (("x", Ref(3)),), (2,), reads=((2, 0),), writes=((1, 1),)),
    )
    dag = dependency_graph(replace(GRAPH, ops=ops))
    assert sorted(dag.edge_list()) == [(0, 1)]
    assert len(dag) == 2
