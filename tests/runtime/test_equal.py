"""Numbers that are none are equal where both are."""

from __future__ import annotations

import math

import pytest
import torch

from magis.runtime.double_precision import closeness, furthest, off_by, same

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, NAN, INF], [1.0, NAN, INF], True),
        ([1.0, NAN], [NAN, 1.0], False),
        ([INF], [-INF], False),
        ([1.0], [1.5], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_same(ours: list[float], theirs: list[float], equal: bool) -> None:
    assert same(torch.tensor(ours), torch.tensor(theirs)) is equal
    exact = torch.tensor(theirs).double()
    if len(ours) == len(theirs):
        assert (closeness("loss", torch.tensor(ours), torch.tensor(theirs), exact).share <= 1.0) is equal


def test_how_far() -> None:
    assert furthest(torch.tensor([1.0, NAN]), torch.tensor([1.5, NAN])) == 0.5
    assert math.isnan(furthest(torch.tensor([NAN]), torch.tensor([1.0])))
    assert (off_by(NAN, NAN), off_by(INF, INF), off_by(NAN, 1.0), off_by(INF, -INF)) == (0.0, 0.0, INF, INF)
    assert off_by(1.1, 1.0) == pytest.approx(0.1)


def test_no_slack_hides_behind_an_overflow() -> None:
    theirs = torch.tensor([INF, 1.0])
    assert closeness("loss", torch.tensor([INF, 2.0]), theirs, theirs.double()).share > 1.0
