"""How values lie on storages, against the set of elements that they touch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magis.graph import Storage, Value
from magis.graph.hazards import fills, is_dense

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
