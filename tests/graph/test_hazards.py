"""Order constraints: enough of them (no legal order changes a number), and none too many; lives; windows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import rustworkx as rx
import torch
from hypothesis import given
from hypothesis import strategies as st

from magis.errors import VerifyError
from magis.graph import GENERATOR, Graph, Op, Ref, Storage, Value, verify
from magis.graph.hazards import (
    dependency_graph,
    fills,
    is_dense,
    is_pure_view,
    last_uses,
    lifetimes,
    order_edges,
    packed,
    row_major,
)
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
    assert is_pure_view(GRAPH.values, view)
    assert is_pure_view(GRAPH.values, replace(view, outputs=(2, None, 2), many=True))
    assert not is_pure_view(GRAPH.values, replace(view, writes=((1, 1),)))
    assert not is_pure_view(GRAPH.values, replace(view, random=True))
    assert not is_pure_view(GRAPH.values, replace(view, outputs=(3,)))  # a fresh storage
    assert not is_pure_view(GRAPH.values, replace(view, outputs=(2, 3), many=True))
    assert not is_pure_view(GRAPH.values, replace(view, outputs=()))  # nothing made: magis.wait
    assert not is_pure_view(GRAPH.values, replace(view, args=()))  # made from nothing


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


# --- lives of storages and values, against definitions read off word by word ------------------------------------------


def touching(graph: Graph, storage: int) -> list[int]:
    return [
        at
        for at, op in enumerate(graph.ops)
        if any(graph.values[value].storage == storage for value in (*op.inputs(), *op.made()))
    ]


@given(schedules(14))
def test_a_storage_lives_from_its_first_to_its_last_touch(graph: Graph) -> None:
    lives = lifetimes(graph)
    returned = {graph.values[value].storage for value in graph.outputs}
    for storage in graph.storages.values():
        touched = touching(graph, storage.id)
        if storage.kind not in ("temporary", "host") or not touched:
            assert storage.id not in lives.born
            assert storage.id not in lives.dies
        else:
            assert lives.born[storage.id] == touched[0]
            assert lives.dies[storage.id] == (len(graph.ops) if storage.id in returned else touched[-1])


@given(schedules(14), st.data())
def test_eagers_own_lives_come_first(graph: Graph, data: st.DataObject) -> None:
    plain = lifetimes(graph)
    deaths = {
        storage: data.draw(st.integers(0, len(graph.ops)))
        for storage in data.draw(st.sets(st.sampled_from(sorted(graph.storages)), max_size=6))
    }
    lives = lifetimes(graph, deaths)
    returned = {graph.values[value].storage for value in graph.outputs}
    assert lives.born == plain.born
    for storage, born in plain.born.items():
        if storage in returned or storage not in deaths:
            assert lives.dies[storage] == len(graph.ops)
        else:  # freed after that many operators, the one that made it included
            assert lives.dies[storage] == max(born, deaths[storage] - 1)


@given(schedules(14))
def test_a_value_is_forgotten_with_its_last_use(graph: Graph) -> None:
    forgotten = last_uses(graph)
    assert len(forgotten) == len(graph.ops)
    kept = {*graph.inputs, *graph.outputs}
    expected: list[list[int]] = [[] for _ in graph.ops]
    for value in graph.values:
        uses = [at for at, op in enumerate(graph.ops) if value in op.inputs() or value in op.made()]
        if uses and value not in kept:
            expected[uses[-1]].append(value)
    assert [list(values) for values in forgotten] == expected


def test_a_real_step_forgets_everything_but_its_loss() -> None:
    graph = captured(NETS["batch-norm"].build()).graph
    made = {value for op in graph.ops for value in op.made()}
    assert {value for values in last_uses(graph) for value in values} == made - set(graph.outputs)


# --- how values lie on storages, against the set of elements that they touch ------------------------------------------

dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 13)), max_size=4)


def elements(value: Value) -> list[int]:
    steps = [[i * step for i in range(size)] for size, step in zip(value.shape, value.stride, strict=True)]
    return [value.offset + sum(at) for at in itertools.product(*steps)]


def value_of(dims: list[tuple[int, int]], offset: int = 0, dtype: str = "float32") -> Value:
    return Value(0, tuple(n for n, _ in dims), tuple(s for _, s in dims), dtype, 0, offset)


@given(dims)
def test_dense_is_every_element_once_in_one_piece(dims: list[tuple[int, int]]) -> None:
    found = elements(value_of(dims))
    whole = sorted(found) == list(range(len(found)))
    assert is_dense(value_of(dims)) == whole


@given(st.permutations([4, 1, 3, 2]), st.permutations([0, 1, 2, 3]))
def test_permuted_tensors_are_dense(sizes: list[int], order: list[int]) -> None:
    tensor = torch.empty(sizes).permute(order)
    assert is_dense(Value(0, tuple(tensor.shape), tuple(tensor.stride()), "float32", 0))


@given(dims, st.integers(0, 3), st.integers(0, 300), st.sampled_from(["float32", "float64", "bool"]))
def test_filling_is_touching_every_byte_once(dims: list[tuple[int, int]], offset: int, nbytes: int, dtype: str) -> None:
    value = value_of(dims, offset, dtype)
    item = {"float32": 4, "float64": 8, "bool": 1}[dtype]
    for size in (nbytes, len(elements(value)) * item):
        touched = sorted(element * item + byte for element in elements(value) for byte in range(item))
        assert fills(value, Storage(0, size, "temporary")) == (touched == list(range(size)))


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_few_elements(shape: tuple[int, ...]) -> None:
    stride = tuple(1 for _ in shape)
    value = Value(0, shape, stride, "float32", 0)
    assert fills(value, Storage(0, value.nbytes, "temporary"))
    assert not fills(value, Storage(0, value.nbytes + 4, "temporary"))


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple))
def test_row_major_strides_are_those_of_a_fresh_tensor(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


@given(st.data(), st.lists(st.integers(0, 4), max_size=4))
def test_packed_strides_are_those_that_torch_gives_a_copy(data: st.DataObject, sizes: list[int]) -> None:
    """Of permuted tensors, whole ones and stretches of them."""
    order, step = data.draw(st.permutations(range(len(sizes)))), data.draw(st.integers(1, 2))
    whole = torch.empty(sizes).permute(order)
    tensor = whole[(slice(None, None, step),) * len(sizes)]
    copy = torch.empty_like(tensor)
    found = packed(tuple(tensor.shape), tensor.stride())
    assert is_dense(Value(0, tuple(tensor.shape), found, "float32", 0))
    several = [at for at, size in enumerate(tensor.shape) if size > 1]
    assert tensor.numel() == 0 or [found[at] for at in several] == [copy.stride(at) for at in several]
    assert packed(tuple(whole.shape), row_major(tuple(whole.shape))) == row_major(tuple(whole.shape))
