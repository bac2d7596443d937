"""The two-level program: each choice against brute force over its own model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="other planners are linear and integer programs, which scipy solves")

from benchmarks.lib.planners.options import Option, choose, options
from benchmarks.lib.planners.shares import Item, Layer, Row, TwoLevel, inner, outer
from magis.simulate.problem import KEEP, RECOMPUTE, SWAP
from tests.planners.modular import setting
from tests.strategies import examples

MIB = 1 << 20


sizes = st.integers(1, 40).map(lambda quarter: quarter * MIB // 4)
items = st.builds(Item, sizes, st.integers(0, 5000).map(lambda us: us * 1000), st.booleans(), st.booleans())


@examples(30)
@given(st.lists(items, min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 0.04]))
def test_the_inner_choice_is_the_best_of_all(every: list[Item], keep: float, out: float, link: float) -> None:
    total = sum(item.nbytes for item in every)
    keep_bytes, offload_bytes = keep * total, out * total

    def cost(chosen: Sequence[int]) -> tuple[float, float]:
        """Bytes kept above the target, and nanoseconds; infinite where the choice is not allowed."""
        held, sent, ns = 0, 0, 0.0
        for item, flag in zip(every, chosen, strict=True):
            if (flag == RECOMPUTE and not item.may_recompute) or (flag == SWAP and not item.may_offload):
                return math.inf, math.inf
            held += item.nbytes * (flag == KEEP)
            sent += item.nbytes * (flag == SWAP)
            ns += item.redo_ns * (flag == RECOMPUTE)
        over = max(0.0, sent - offload_bytes)
        if over > 0.05 * offload_bytes + 16:
            return math.inf, math.inf
        return max(0.0, held - keep_bytes), ns + over * link

    best = min(cost(chosen) for chosen in itertools.product((KEEP, RECOMPUTE, SWAP), repeat=len(every)))
    found = cost(inner(every, keep_bytes, offload_bytes, link))
    assert found[0] == pytest.approx(best[0], abs=64)
    if found[0] <= best[0] + 1:
        assert found[1] <= best[1] * (1 + 1e-6) + 1000


@st.composite
def layered(draw: st.DrawFn) -> tuple[list[Row], list[Layer]]:
    every = [
        Layer(tuple(draw(st.lists(items, min_size=1, max_size=3))), *(draw(st.integers(0, 10**7)) for _ in range(2)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    rows = [
        Row(layer, draw(st.integers(0, 20)) * MIB, tuple(each.nbytes * draw(st.integers(0, 2)) // 2 for each in every))
        for layer in range(len(every))
        for _ in range(2)
    ]
    return rows, every


@examples(20)
@given(layered(), st.sampled_from([0.0, 0.04]), st.floats(0, 1))
def test_the_outer_shares_keep_the_rows_and_no_others_are_cheaper(
    model: tuple[list[Row], list[Layer]], link: float, tight: float
) -> None:
    rows, every = model

    def peak(shares: Sequence[tuple[float, float, float]]) -> float:
        return max(
            row.fixed
            + row.idle[row.layer]
            + sum(shares[i][0] * row.idle[i] for i in range(len(every)) if i != row.layer)
            + (shares[row.layer - 1][2] * row.idle[row.layer - 1] if row.layer else 0.0)
            for row in rows
        )

    def allowed(shares: Sequence[tuple[float, float, float]]) -> bool:
        for number, (layer, (kept, redone, out)) in enumerate(zip(every, shares, strict=True)):
            most = layer.most
            hidden = min(layer.forward_ns, layer.backward_ns) >= out * layer.nbytes * link - 10
            if kept < layer.least_kept - 1e-6 or redone > most[0] + 1e-6 or out > most[1] + 1e-6 or not hidden:
                return False
            if out > 1e-6 and (link == 0.0 or number == len(every) - 1):
                return False
        return True

    everything = [(1.0, 0.0, 0.0)] * len(every)
    least = outer(rows, every, link, None)
    assert least is not None
    assert allowed(least[0])
    assert peak(least[0]) <= least[1] + 64
    budget = peak(everything) + (least[1] - peak(everything)) * tight + 64
    found = outer(rows, every, link, budget)
    assert found is not None
    assert allowed(found[0])
    assert peak(found[0]) <= budget + 64

    def cost(shares: Sequence[tuple[float, float, float]]) -> float:
        return sum(redone * layer.forward_ns for layer, (_, redone, _) in zip(every, shares, strict=True))

    grid = [(k / 4, r / 4, (4 - k - r) / 4) for k in range(5) for r in range(5 - k)]
    for shares in itertools.product(grid, repeat=len(every)):
        if allowed(shares):
            assert peak(shares) >= least[1] - 64
            if peak(shares) <= budget:
                assert cost(found[0]) <= cost(shares) + 10_000


@examples(8)
@given(layered(), st.sampled_from([0.0, 0.04]), st.floats(0, 1))
def test_the_chosen_options_are_the_best_of_all(
    model: tuple[list[Row], list[Layer]], link: float, tight: float
) -> None:
    rows, layers_ = model
    every = [options(layer, link, last=number == len(layers_) - 1)[:4] for number, layer in enumerate(layers_)]
    sizes_ = [layer.nbytes for layer in layers_]

    def peak(chosen: Sequence[Option]) -> float:
        shares = [(each.kept / layer.nbytes, each.sent / layer.nbytes) for each, layer in zip(chosen, layers_)]  # noqa: B905
        return max(
            row.fixed
            + row.idle[row.layer]
            + sum(shares[i][0] * row.idle[i] for i in range(len(every)) if i != row.layer)
            + (shares[row.layer - 1][1] * row.idle[row.layer - 1] if row.layer else 0.0)
            for row in rows
        )

    combinations = list(itertools.product(*every))
    least = choose(rows, sizes_, every, None, gap=0.0)
    assert least is not None
    assert least[1] == pytest.approx(min(map(peak, combinations)), abs=64)
    budget = peak([mine[0] for mine in every]) * (1 - tight) + least[1] * tight + 64
    found = choose(rows, sizes_, every, budget, gap=0.0)
    assert found is not None
    assert peak(found[0]) <= budget + 64
    assert (
        found[1]
        <= min(sum(each.ns for each in chosen) for chosen in combinations if peak(chosen) <= budget - 64) + 1000
    )


def test_nothing_random_is_recomputed_and_nothing_small_is_offloaded() -> None:
    found = setting("transformer")
    for send_on in (False, True):
        program = TwoLevel(found, send_on=send_on)
        flags = program.flags(found.budget(program.least(), 1.0))
        assert flags is not None
        drawn = found.origins.random[found.problem.producer]
        assert (flags[drawn] != RECOMPUTE).all()
        assert (found.problem.nbytes[flags == SWAP] >= MIB).all()
        assert (flags[found.saved] == RECOMPUTE).any()
        assert (flags[program.goes_on] == KEEP).all() or send_on
