"""Selective checkpointing: each choice against brute force over its own model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="other planners are linear and integer programs, which scipy solves")

from benchmarks.lib.planners.modules import Curve, Group, Module, fitted, modules
from benchmarks.lib.planners.selective import checkpointed, discards, stored
from benchmarks.lib.planners.solver import Program
from magis.simulate.problem import KEEP, RECOMPUTE
from tests.planners.modular import setting
from tests.strategies import examples

MIB = 1 << 20


groups = st.lists(
    st.builds(
        lambda nbytes, us, held: (nbytes * MIB // 4, us * 1000, held),
        st.integers(0, 40),
        st.integers(1, 500),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
).map(lambda every: [Group((number,), *each) for number, each in enumerate(every)])


@examples(30)
@given(groups, st.floats(0, 1))
def test_what_a_module_stores_is_the_best_of_all(every: list[Group], share: float) -> None:
    most = math.ceil(share * sum(group.nbytes for group in every) - 1e-6)
    best = -1
    for chosen in itertools.product((False, True), repeat=len(every)):
        kept = [group for group, keep in zip(every, chosen, strict=True) if keep]
        if sum(group.nbytes for group in kept) <= most and all(g.stored <= keep for g, keep in zip(every, chosen)):  # noqa: B905
            best = max(best, sum(group.ns for group in kept))
    found = stored(every, share)
    assert (found is None) == (best < 0)
    if found is not None:
        assert sum(group.ns for group, keep in zip(every, found, strict=True) if keep) == best


@examples(60)
@given(groups)
def test_a_curve_rises_from_nothing_to_all(every: list[Group]) -> None:
    curve = fitted(every)
    assert 1 <= len(curve.slopes) == len(curve.intercepts) <= 2
    assert all(map(math.isfinite, (*curve.slopes, *curve.intercepts)))


@st.composite
def trees(draw: st.DrawFn) -> list[Module]:
    """A model of modules, each with one or two leaves, all in one root."""
    every: list[Module] = []
    for block in range(draw(st.integers(1, 3))):
        leaves = range(len(every), len(every) + draw(st.integers(1, 2)))
        every += [made(draw, f"{block}.{leaf}", frozenset()) for leaf in leaves]
        every.append(made(draw, f"{block}", frozenset(leaves)))
    return [*every, made(draw, "", frozenset(range(len(every))))]


def made(draw: st.DrawFn, path: str, inside: frozenset[int]) -> Module:
    nbytes, us = draw(st.integers(1, 40)) * MIB // 4, draw(st.integers(1, 500))
    flat, steep = sorted(draw(st.floats(0.1, 3)) for _ in range(2))
    curve = Curve((flat, steep), (0.0, (flat - steep) * 0.5))
    group = Group((0,), nbytes, us * 1000, stored=False)
    saved = int(nbytes * draw(st.floats(0, 1)))
    peak = draw(st.integers(0, 80)) * MIB // 4
    return Module(path, (0,), not inside, (group,), curve, saved, peak, inside)


@examples(20)
@given(trees(), st.floats(0, 1))
def test_the_checkpointed_modules_are_the_best_of_all(every: list[Module], tight: float) -> None:
    least = discards(every, None)
    assert least is not None
    base = max(module.peak for module in every)
    budget = base + (least[1] - base) * tight + 64
    found = discards(every, budget)
    assert found is not None
    able = [number for number, module in enumerate(every) if not module.leaf]
    best = math.inf
    for chosen in subsets(able):
        if not any(every[number].inside & chosen for number in chosen):
            best = min(best, cheapest(every, sorted(chosen), budget))
    assert found[1] == pytest.approx(best, abs=2000)
    assert set(found[0]) <= set(able)


def subsets(numbers: list[int]) -> Iterator[frozenset[int]]:
    for count in range(len(numbers) + 1):
        yield from map(frozenset, itertools.combinations(numbers, count))


def cheapest(every: list[Module], chosen: list[int], budget: float) -> float:
    """The least time (ns) with exactly these modules checkpointed: shares alone are free."""
    program = Program()
    share = {number: program.variable(upper=1.0) for number in chosen}
    for number in chosen:
        module = every[number]
        unsaved = max(0, module.nbytes - module.saved_bytes)
        program.row([(share[number], module.nbytes / MIB)], low=unsaved / MIB)
        time = program.variable(1.0)
        for slope, intercept in zip(module.curve.slopes, module.curve.intercepts, strict=True):
            us = module.ns / 1000
            program.row([(time, 1.0), (share[number], -us * slope)], low=us * intercept)
    for number, module in enumerate(every):
        before = [other for other in chosen if other < number]
        unsaved = sum(max(0, every[other].nbytes - every[other].saved_bytes) for other in before)
        freed = [(share[other], -every[other].nbytes / MIB) for other in before]
        program.row(freed, high=(budget - module.peak - unsaved) / MIB + 1e-9)
    found = program.solve()
    return math.inf if found is None else float(np.dot(program.costs, found)) * 1000


def test_a_checkpointed_module_keeps_its_inputs_and_makes_the_rest_again() -> None:
    found = setting("no link")
    every = modules(found)
    number = next(n for n, module in enumerate(every) if module.path == "layers.1")
    flags = checkpointed(found, every, {number: 1.0})
    assert flags is not None
    inside = np.isin(found.problem.producer, every[number].nodes)
    last = found.problem.producer == every[number].nodes[-1]
    assert (flags[found.saved & inside & ~last] == RECOMPUTE).all()
    assert (flags[found.saved & ~inside] == KEEP).all()
    entering = {
        s for node in every[number].nodes for s in found.problem.inputs(node).tolist() if not inside[s]
    }  # fmt: skip
    assert (flags[sorted(entering)] == KEEP).all()
    plan = found.judged(flags)
    assert plan.latency_ns > found.judged(found.untouched).latency_ns
    again = np.flatnonzero(found.evaluator.recomputed())
    assert set(again.tolist()) <= set(np.flatnonzero(inside).tolist())
