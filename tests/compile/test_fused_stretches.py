"""Stretches of a plan: which of their inputs may lie in one storage that they write."""

from __future__ import annotations

import pytest

from magis.extensions.compile.fused_stretches import _lie_apart
from magis.graph import Value


@pytest.mark.parametrize(
    ("offset", "stride", "apart"), [(12, (4, 1), True), (11, (4, 1), False), (12, (8, 1), False), (0, (4, 1), False)]
)
def test_written_inputs_of_one_storage_share_no_byte(offset: int, stride: tuple[int, int], apart: bool) -> None:
    first = Value(0, (3, 4), (4, 1), "float32", storage=7)
    second = Value(1, (3, 4), stride, "float32", storage=7, offset=offset)
    assert _lie_apart([second, first], {7}) == apart
    assert _lie_apart([second, first], set())
