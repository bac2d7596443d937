"""Waists, full and incremental scheduling: against definitions, every legal order, and cases drawn by hand."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from magis.extensions.paper.incremental_schedule import full_order, incremental_order, intervals, splice
from magis.extensions.paper.stretch_order import best_order, floor_of, peak_of
from magis.extensions.paper.stretches import Steps, cuts, stretch
from magis.extensions.paper.waists import NARROW, core, in_parts, precedence, waists
from magis.simulate.evaluator import Evaluator, check_order
from magis.simulate.problem import KEEP, Int32s, Int64s, NodeRow, Problem, StorageRow, build_problem
from tests.search.networks import transformer, unet
from tests.simulate.plans import plans, problems, random_order
from tests.strategies import examples


def program(problem: Problem) -> Int32s:
    return np.arange(problem.n_nodes, dtype=np.int32)


def keep(problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    return np.full(problem.n_storages, KEEP, dtype=np.int8)


def peak(problem: Problem, order: Int32s) -> int:
    return Evaluator(problem, order).quick(keep(problem))[0]


def needed(problem: Problem) -> list[set[int]]:
    return [
        {*problem.extras(v).tolist(), *problem.producer[problem.inputs(v)].tolist()} for v in range(problem.n_nodes)
    ]


def above(problem: Problem) -> list[set[int]]:
    """Ancestors, by the definition."""
    found: list[set[int]] = []
    for before in needed(problem):
        found.append(before.union(*(found[other] for other in before)))
    return found


def legal_orders(problem: Problem) -> list[Int32s]:
    before = needed(problem)
    return [
        np.array(order, dtype=np.int32)
        for order in itertools.permutations(range(problem.n_nodes))
        if all(before[v] <= set(order[:k]) for k, v in enumerate(order))
    ]


def whole(problem: Problem, order: Int32s) -> Int64s:
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return best_order(stretch(Steps(problem), order, position, 0, len(order), {}), 4096)


def chained(*edges: tuple[int, ...], sizes: tuple[int, ...] = ()) -> Problem:
    """One storage per node, made from those named."""
    rows = [NodeRow(inputs, (node,), 1) for node, inputs in enumerate(edges)]
    return build_problem(rows, [StorageRow(size) for size in (sizes or (1,) * len(edges))])


# --- waists -----------------------------------------------------------------------------------------------------


@examples(100)
@given(problems(14))
def test_nodes_beside_are_as_defined(problem: Problem) -> None:
    needs = precedence(problem)
    before = above(problem)
    assert [set(needs(v).tolist()) for v in range(problem.n_nodes)] == needed(problem)
    found = waists(needs, np.ones(problem.n_nodes, dtype=np.bool_))
    for v in range(problem.n_nodes):
        below = sum(v in before[other] for other in range(problem.n_nodes))
        assert found.beside[v] == problem.n_nodes - len(before[v]) - below - 1


@examples(40)
@given(problems(14))
def test_the_core_has_the_longest_path_and_what_lies_between_its_ends(problem: Problem) -> None:
    before = above(problem)
    depth: list[int] = []
    for each in needed(problem):
        depth.append(1 + max((depth[other] for other in each), default=0))
    inside = set(np.flatnonzero(core(precedence(problem))).tolist())
    start, end = min(inside), max(inside)
    assert depth[start] == 1
    assert depth[end] == max(depth)
    assert inside == {v for v in before[end] | {end} if v == start or start in before[v]}


@examples(60)
@given(problems(14))
def test_parts_are_legal_and_end_at_waists(problem: Problem) -> None:
    needs = precedence(problem)
    found = waists(needs)
    order = in_parts(needs, found, program(problem))
    check_order(problem, order)
    place = order.tolist().index
    before = above(problem)
    narrow = [v for v in range(problem.n_nodes) if found.core[v] and found.beside[v] == 0]
    for v in narrow:  # nothing of the core stands on the wrong side of a node that all of it is related to
        assert all(place(other) < place(v) for other in before[v])
    assert NARROW == 1


# --- the dynamic program ----------------------------------------------------------------------------------------


@examples(40)
@given(problems(6))
def test_a_full_order_is_the_best_of_all(problem: Problem) -> None:
    best = min(peak(problem, order) for order in legal_orders(problem))
    order = full_order(problem)
    check_order(problem, order)
    assert peak(problem, order) == best


@examples(60)
@given(plans())
def test_a_stretch_counts_bytes_as_the_evaluator_does(plan: tuple[Problem, Int32s, np.ndarray]) -> None:
    problem, order, _ = plan
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    made = stretch(Steps(problem), order, position, 0, len(order), {})
    assert peak_of(made, np.arange(len(order))) + problem.persistent_bytes == peak(problem, order)
    assert floor_of(made) <= peak_of(made, whole(problem, order))


def test_real_steps_keep_their_hazards_in_full() -> None:
    for problem, _ in (transformer(3, batch=2), unet(3)):
        order = full_order(problem, most=64)
        check_order(problem, order)
        assert peak(problem, order) <= peak(problem, program(problem))


def test_cuts_cover_an_interval_once() -> None:
    problem, _ = transformer(4, batch=2)
    steps = Steps(problem)
    found = cuts(steps.narrowness, program(problem), 7, problem.n_nodes - 3)
    assert [found[0][0], *(end for _, end in found)] == [*(start for start, _ in found), problem.n_nodes - 3]
    assert all(end - start <= 60 for start, end in found)


# --- incremental ------------------------------------------------------------------------------------------------


@examples(80)
@given(plans(), st.integers(0, 2**32 - 1))
def test_an_order_after_a_rewrite_is_legal_and_no_worse(plan: tuple[Problem, Int32s, np.ndarray], seed: int) -> None:
    problem, order, flags = plan
    rng = np.random.default_rng(seed)
    touched = rng.choice(problem.n_nodes, size=int(rng.integers(1, 4)))
    for chosen in (flags, keep(problem)):
        judge = Evaluator(problem, order)
        before, _ = judge.quick(chosen)
        found = incremental_order(judge, chosen, touched.tolist())
        check_order(problem, found)
        assert Evaluator(problem, found).quick(chosen)[0] <= before


@examples(40)
@given(problems(12), st.integers(0, 2**32 - 1))
def test_a_splice_keeps_the_old_order_where_it_can(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_order(problem, rng)
    rank = np.empty(problem.n_nodes, dtype=np.int64)
    rank[old] = np.arange(problem.n_nodes)
    steps = Steps(problem)
    assert splice(steps, rank).tolist() == old.tolist()
    rank[rng.random(problem.n_nodes) < 0.3] = -1
    check_order(problem, splice(steps, rank))


def test_nothing_outside_of_the_waists_moves() -> None:
    """Three cells of two branches; the middle one was rewritten and runs its branches interleaved."""
    cell = (0, 100, 100, 1, 1, 1)
    edges: list[tuple[int, ...]] = [()]
    sizes = [1]
    for _ in range(3):
        x = len(edges) - 1
        edges += [(x,), (x,), (x + 1,), (x + 2,), (x + 3, x + 4)]
        sizes += cell[1:]
    problem = chained(*edges, sizes=tuple(sizes))
    steps = Steps(problem)
    assert np.flatnonzero(steps.narrowness == 0).tolist() == [0, 5, 10, 15]
    assert intervals(steps.narrowness, program(problem), [7, 8]) == [(6, 11)]
    found = incremental_order(Evaluator(problem, program(problem)), keep(problem), [7, 8], steps=steps)
    assert found.tolist()[:6] == [0, 1, 2, 3, 4, 5]
    assert found.tolist()[6:11] == [6, 8, 7, 9, 10]
    assert found.tolist()[11:] == [11, 12, 13, 14, 15]


def test_a_wide_step_is_not_searched_for_ever() -> None:
    """No waist for a long way: the interval ends where it was narrowest."""
    wide = np.full(201, 50)
    wide[33] = 7
    order = np.arange(201, dtype=np.int32)
    assert intervals(wide, order, [50]) == [(34, 51)]
    assert intervals(wide, order, [195]) == [(195, 201)]
    assert intervals(wide, order, [50, 70]) == [(34, 71)]
    assert intervals(wide, order, [50, 195]) == [(34, 51), (195, 201)]
