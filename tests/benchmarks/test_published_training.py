"""Published speeds of training: the halves of the table, and the queue that eager's host fills."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.lib.published_training import (
    CLASSES,
    cells,
    product_ratio,
    product_rows,
    queued_ns,
)
from magis.cost.devices import find_device


def test_every_class_of_devices_has_cells_for_fitting_and_as_many_for_judging() -> None:
    halves = Counter((cell.device, half) for cell, half in cells())
    for members in CLASSES:
        fit, judge = (sum(halves[device, half] for device in members) for half in ("fit", "judge"))
        assert fit == judge >= 5
    assert len({cell.key for cell, _ in cells()}) < len(cells()) == len(set(cells()))


@pytest.mark.parametrize(
    ("issues", "wait_at", "expected"),
    [
        ([(10, 1), (10, 1), (10, 1)], None, 31),  # the device is the bound, from the first call on
        ([(1, 10), (1, 10), (1, 10)], None, 31),  # the host is
        ([(10, 1), (0, 1), (1, 1)], None, 12),  # behind a long call views and short calls are free
        ([(10, 1), (0, 50)], None, 51),  # the step ends when the host is through as well
        ([(10, 1), (1, 5), (1, 5)], 1, 22),  # it reads a number before the second call
    ],
)
def test_the_queue(issues: list[tuple[int, int]], wait_at: int | None, expected: int) -> None:
    assert queued_ns(issues, wait_at) == expected


def test_products_of_every_size_are_within_a_third() -> None:
    for row in product_rows():
        assert 0.7 < product_ratio(row, find_device(f"sim:{row['device']}")) < 1.34, row
