"""Axes with round ticks, and labels beside each other."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.report.axes import Label, LinearScale, byte_scale, overlap, placed, text_box, time_scale


def check(axis: LinearScale, most: float) -> None:
    assert 3 <= len(axis.ticks) <= 8
    assert axis.ticks[0] == 0
    assert axis.ticks[-1] == pytest.approx(axis.end)
    assert axis.end >= most * (1 - 1e-9)
    assert axis.end - axis.step < most * (1 + 1e-9) or len(axis.ticks) == 3
    assert len({axis.words(tick) for tick in axis.ticks}) == len(axis.ticks)


@given(st.integers(0, 2**50))
def test_bytes_have_ticks_a_power_of_two_apart(most: int) -> None:
    axis = byte_scale(most)
    check(axis, most)
    assert int(axis.step).bit_count() == 1
    assert axis.share(axis.end) == 1
    for tick in axis.ticks[1:]:
        number, unit = axis.words(tick).split(" ")
        assert unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
        assert (8 * float(number)).is_integer()  # halves, quarters, eighths
        assert float(number) < 1024 or unit == "PiB"


@given(st.floats(1e-6, 1e9))
def test_times_have_ticks_of_1_2_or_5_times_a_power_of_ten(most: float) -> None:
    axis = time_scale(most)
    check(axis, most)
    step = axis.step / axis.per_unit
    assert any(math.isclose(step / 10 ** math.floor(math.log10(step) + 1e-9), digit) for digit in (1, 2, 5))
    assert axis.unit == ("s" if most >= 10_000 else "ms")


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 400), st.text("0123456789", max_size=12)), max_size=40))
def test_no_label_lies_on_another_one_or_on_what_is_taken(marks: list[tuple[int, int, str]]) -> None:
    taken = [(x - 3.0, y - 3.0, x + 3.0, y + 3.0) for x, y, _ in marks]
    labels = [Label(words, ((x + 5, y - 5, "start"), (x - 5, y + 15, "end")), "red") for x, y, words in marks]
    found = list(placed(labels, taken, (0, 0, 600, 400)))
    boxes = [text_box(label.words, place) for label, place in found]
    assert not any(overlap(a, b) for a, b in combinations(boxes, 2))
    assert not any(overlap(box, mark) for box in boxes for mark in taken)
    assert all(left >= 0 and top >= 0 and right <= 600 and bottom <= 400 for left, top, right, bottom in boxes)
    shown = [label for label, _ in found]
    for label in labels:  # what is left out has no room in any of its places
        if label not in shown:
            for place in label.places:
                box = text_box(label.words, place)
                outside = box[0] < 0 or box[1] < 0 or box[2] > 600 or box[3] > 400
                assert outside or any(overlap(box, other) for other in (*taken, *boxes))
