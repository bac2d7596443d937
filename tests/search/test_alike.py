"""Moves of storages alike: which storages are alike, and what a deep network gains."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.search.alike import AlikeMoves, alike, alike_moves
from magis.search.budgeted_evaluator import BudgetedEvaluator, Objective, SearchOver
from magis.search.moves import climb
from magis.search.pareto_sweep import BRIEF, sweep
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, Problem
from tests.search.networks import resnet, transformer, unet
from tests.simulate.plans import problems

ANY = Objective(memory_limit=0)


def surroundings(problem: Problem, storage: int, radius: int) -> object:
    """All that is seen from a storage, as a tree."""
    nodes = range(problem.n_nodes)

    def of_node(node: int, left: int) -> object:
        if not left:
            return int(problem.node_ns[node])
        near = (problem.inputs(node).tolist(), problem.outputs(node).tolist())
        return of_node(node, left - 1), *(sorted((of_storage(s, left - 1) for s in each), key=repr) for each in near)

    def of_storage(storage: int, left: int) -> object:
        if not left:
            return int(problem.nbytes[storage])
        read = [of_node(node, left) for node in nodes if storage in problem.inputs(node)]
        made = of_node(int(problem.producer[storage]), left)
        return of_storage(storage, left - 1), made, sorted(read, key=repr)

    return of_storage(storage, radius)


@given(problems(), st.integers(0, 2))
def test_storages_are_alike_exactly_if_their_surroundings_are(problem: Problem, radius: int) -> None:
    groups = [group.tolist() for group in alike(problem, radius)[radius]]
    assert sorted(itertools.chain(*groups)) == list(range(problem.n_storages))
    seen = [repr(surroundings(problem, group[0], radius)) for group in groups]
    assert len(set(seen)) == len(seen)
    for group, expected in zip(groups, seen, strict=True):
        assert all(repr(surroundings(problem, storage, radius)) == expected for storage in group)


def moves_of(problem: Problem, goal: Objective = ANY, *, swap: bool = False) -> AlikeMoves | None:
    return alike_moves(BudgetedEvaluator(problem, goal, 10_000), allow_swap=swap)


def test_layers_have_storages_alike() -> None:
    problem, marks = transformer(12)
    (group,) = (group for group in alike(problem)[2] if marks[6] in group)
    assert set(marks[1:-1]) <= set(group.tolist())
    for deep in (problem, resnet((8, 1))[0]):
        assert moves_of(deep) is not None
    for other in (transformer(2)[0], unet(3)[0]):  # every level of a unet has its own sizes
        assert moves_of(other) is None


def by_hand(problem: Problem, marks: list[int]) -> tuple[int, int]:
    """Peak and latency where each block is recomputed from its input."""
    evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
    flags = np.where(evaluator.step.redoable, RECOMPUTE, KEEP).astype(np.int8)
    flags[marks] = KEEP
    return evaluator.quick(flags)


@pytest.mark.parametrize("layers", [12, 48])
@pytest.mark.parametrize("link", [0.0, 0.02], ids=["without swaps", "with swaps"])
def test_a_deep_network_is_planned_at_once(layers: int, link: float) -> None:
    """As lean as with checkpoints by hand, in as many states whatever the depth; as many moves of single storages end
    above."""
    problem, marks = transformer(layers, dropout=False, xfer_ns_per_byte=link)
    peak, latency_ns = by_hand(problem, marks)
    goal = Objective(latency_limit_ns=latency_ns)
    moves = moves_of(problem, goal, swap=link > 0.0)
    assert moves is not None
    judge = moves.judge
    found = moves.climb(goal, judge.plan(judge.untouched), 2_000)
    assert found.met(goal)
    assert found.peak <= peak
    assert judge.states <= 800
    assert judge.evaluator.quick(found.flags) == (found.peak, found.latency_ns)
    alone = BudgetedEvaluator(problem, goal, judge.states)
    start = alone.plan(alone.untouched)
    with pytest.raises(SearchOver):
        climb(alone, goal, start, allow_swap=link > 0.0)
    assert alone.best is not None
    assert found.peak < alone.best.peak
    shaken = moves.shake(goal, found, 3_000, seed=0)
    assert shaken.met(goal)
    assert shaken.peak <= found.peak
    again = moves_of(problem, goal, swap=link > 0.0)
    assert again is not None
    assert np.array_equal(again.shake(goal, found, 3_000, seed=0).flags, shaken.flags)


def test_the_front_of_a_deep_network_is_below_checkpoints_by_hand() -> None:
    problem, marks = transformer(48, dropout=False)
    peak, latency_ns = by_hand(problem, marks)
    assert any(plan.peak <= peak and plan.latency_ns <= latency_ns for plan in sweep(problem, BRIEF).points)


def test_no_more_states_than_asked_for() -> None:
    moves = moves_of(transformer(12)[0])
    assert moves is not None
    judge = moves.judge
    base = judge.plan(judge.untouched)
    for most in (1, 7, 50):
        for way in (moves.climb, partial(moves.shake, seed=0)):
            before = judge.states
            assert way(ANY, base, most).key(ANY) <= base.key(ANY)
            assert judge.states - before <= most
    assert (base.flags == DROP).all()
