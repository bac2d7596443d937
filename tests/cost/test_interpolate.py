"""Between measured sizes: exact on a curve of the roofline's shape, honest about what it does not know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.cost.devices import find_device
from magis.cost.operator_latency import ESTIMATED, INTERPOLATED, MEASURED, Prices, roofline_ns
from magis.cost.profile_store import LEAST, REACH, Curve, Entry, Profile, kin_key
from magis.cost.shapes import parse_with_outputs
from magis.cost.signature import parse
from tests.strategies import examples

GPU = find_device("sim:h200")


def gelu(rows: int, columns: int = 1024, dtype: str = "float32") -> str:
    return f"aten.gelu.default({dtype}[{rows},{columns}]{{{columns},1}})"


def profile_of(times: dict[str, int]) -> Profile:
    return Profile({"device": "cuda", "gpu": "NVIDIA H200"}, {key: Entry(ns, 0, 64, 9) for key, ns in times.items()})


def expected(key: str) -> int:
    return roofline_ns(GPU, *parse_with_outputs(key))


points = st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 10**9)), min_size=LEAST, max_size=12)


@given(points, st.integers(1, 10**10))
def test_an_answer_lies_between_the_ratios_of_its_neighbours(known: list[tuple[int, int]], asked: int) -> None:
    curve = Curve.of(known)
    answer = curve.at(asked)
    if answer is None:
        assert (
            len(curve.points) < LEAST
            or curve.error > 2
            or not curve.points[0][0] / REACH <= asked <= curve.points[-1][0] * REACH
        )
        return
    ratios = [seen / want for want, seen in curve.points]
    assert min(ratios) * asked - 1 <= answer.ns <= max(ratios) * asked + 1
    assert isinstance(answer.ns, int)


@given(points)
def test_what_was_measured_comes_back(known: list[tuple[int, int]]) -> None:
    curve = Curve.of(known)
    for want, seen in curve.points:
        answer = curve.at(want)
        assert answer is None or answer.ns == seen


@examples(40)
@given(st.lists(st.integers(1, 4096), min_size=4, max_size=9, unique=True), st.integers(1, 4096), st.integers(2, 5))
def test_a_kernel_that_misses_the_roofline_by_a_factor_is_priced_exactly(
    rows: list[int], asked: int, factor: int
) -> None:
    """The curve bends as the roofline does: a constant factor is no guess."""
    times = {gelu(size): factor * expected(gelu(size)) for size in rows}
    prices = Prices(GPU, profile_of(times))
    found = prices.price(*parse_with_outputs(gelu(asked)))
    if found.source == ESTIMATED:  # out of reach, or rooflines that coincide
        assert len({expected(key) for key in times}) < LEAST or not (
            min(map(expected, times)) / REACH <= expected(gelu(asked)) <= max(map(expected, times)) * REACH
        )
        return
    assert found.source == (MEASURED if asked in rows else INTERPOLATED)
    assert found.ns == factor * expected(gelu(asked))
    assert found.error == 0


def test_the_error_is_what_leaving_one_out_costs() -> None:
    smooth = Curve.of([(100, 200), (200, 400), (400, 800)])
    assert smooth.error == 0
    bent = Curve.of([(100, 100), (200, 400), (300, 300)])
    # left out one by one: 200 of 100 by the ratio 2 of its neighbour, 200 instead of 400, 600 instead of 300
    assert bent.error == 1.0
    wild = Curve.of([(100, 1), (200, 100_000), (300, 1)])
    assert wild.at(200) is None  # kin that have nothing in common say nothing


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (gelu(4), gelu(64), True),
        (gelu(4), gelu(4, dtype="bfloat16"), False),
        (gelu(4), "aten.gelu.default(float32[4,1024]{1,4})", False),  # column by column
        (gelu(4), "aten.gelu.default(float32[4,1024]{1024,1}, approximate='tanh')", False),
        (gelu(4), "aten.relu.default(float32[4,1024]{1024,1})", False),
        (gelu(4), "aten.gelu.default(float32[4,1024]{0,1})", False),  # repeated
        (gelu(4), "aten.gelu.default(float32[4,1024]{2048,2})", False),  # every other one
        ("aten.sum.dim_IntList(float32[9,9]{9,1}, [0])", "aten.sum.dim_IntList(float32[9,9]{9,1}, [1])", False),
        ("aten.view.default(float32[64]{1}, [32, 2])", "aten.view.default(float32[96]{1}, [48, 2])", True),
        ("aten.mul.Tensor(float32[9]{1}, 0.5)", "aten.mul.Tensor(float32[99]{1}, 0.25)", True),
        (
            "aten.convolution.default(float32[2,4,8,8]{256,64,8,1}, float32[6,4,3,3]{36,9,3,1}, None, [1, 1])",
            "aten.convolution.default(float32[4,4,8,8]{256,64,8,1}, float32[9,4,3,3]{36,9,3,1}, None, [1, 1])",
            True,
        ),
        (
            "aten.convolution.default(float32[2,4,8,8]{256,64,8,1}, float32[6,4,3,3]{36,9,3,1}, None, [1, 1])",
            "aten.convolution.default(float32[2,4,8,8]{256,64,8,1}, float32[6,4,1,1]{4,1,1,1}, None, [1, 1])",
            False,
        ),
    ],
)
def test_kin_differ_in_sizes_alone(one: str, other: str, alike: bool) -> None:
    assert (kin_key(*parse(one)) == kin_key(*parse(other))) is alike
