"""The largest size: bisection against a look at every size, and batches resized."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from magis.capture import OptimizerSpec, Workload
from magis.capture.workload import fake_tensors
from magis.frontends.fitting import resized
from magis.frontends.limits import largest


@given(st.integers(0, 200), st.integers(1, 300), st.integers(1, 250))
def test_the_answer_is_that_of_looking_at_every_size(limit: int, start: int, most: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        assert 1 <= size <= most
        asked.append(size)
        return size <= limit

    assert largest(fits, start, most) == (min(limit, most) or None)
    assert len(asked) == len(set(asked)) <= 20


@given(st.integers(1, 2**20), st.integers(1, 4096), st.sampled_from([1.0, 1.5, 2.0]), st.integers(0, 5000))
def test_bytes_that_sizes_leave_lead_there_sooner(limit: int, start: int, power: float, fixed: int) -> None:
    spare: dict[int, int] = {}
    allowed = int(fixed + limit**power)

    def fits(size: int) -> bool:
        assert size not in spare
        spare[size] = allowed - int(fixed + size**power)
        return spare[size] >= 0

    assert largest(fits, start, 2**20, spare=spare) == limit
    doubling = 1 + abs(limit.bit_length() - start.bit_length())
    assert len(spare) <= 2 + doubling + (3 if power == 1.0 else 20)


def work(*shapes: tuple[int, ...]) -> Workload:
    tensors = tuple(torch.arange(torch.Size(shape).numel()).reshape(shape) for shape in shapes)
    inputs, targets = tensors[:-1], tensors[-1:]
    return Workload("net", torch.nn.Identity(), inputs, targets, torch.sum, OptimizerSpec("sgd"))


def test_what_shares_the_extent_is_resized_and_rows_repeat() -> None:
    found = resized(work((2, 3), (5, 2), (2,)), 0, 5)
    assert found.inputs[0].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert found.inputs[1].shape == (5, 2)
    assert found.targets[0].tolist() == [0, 1, 0, 1, 0]
    across = resized(work((2, 3), (2, 3), (2,)), 1, 1)
    assert [tuple(t.shape) for t in (*across.inputs, *across.targets)] == [(2, 1), (2, 1), (2,)]


def test_fake_batches_are_resized_without_memory() -> None:
    with fake_tensors():
        found = resized(work((2, 3), (2,)), 0, 1 << 40)
    assert found.inputs[0].shape == (1 << 40, 3)
