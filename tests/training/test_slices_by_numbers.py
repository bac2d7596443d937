"""Slices by numbers that every forward changes: inputs of one plan, or constants of a plan each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from magis.errors import CaptureError
from magis.frontends.audits import Audits
from tests.training.test_state_of_forwards import Net, trained


@pytest.fixture(autouse=True)
def audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit every step: none of these is another one than was planned."""
    monkeypatch.setattr(Audits, "_schedule", lambda _self: None)


def sliced(_net: Net, h: Tensor, place: slice) -> Tensor:
    return h + h[:, place].mean()


def written(_net: Net, h: Tensor, place: slice) -> Tensor:
    h = h.clone()
    h[:, place].mul_(2)
    return h


def set_between(_net: Net, h: Tensor, place: slice) -> Tensor:
    h = h.clone()
    h[:, place] = 0.25
    return h


@pytest.mark.parametrize("use", [sliced, written, set_between])
def test_slices_of_what_has_gradients(use: Callable[[Net, Tensor, slice], Tensor]) -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        net.count += 1
        return use(net, h, slice(net.count, net.count + 4))

    trained(between)


def test_a_slice_that_gets_gradients_by_what_is_written_to_it_is_refused() -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        net.count += 1
        wide = torch.zeros(8, 48)
        wide[:, net.count : net.count + 32].view(8, 32).copy_(h)
        return wide[:, 3:35]

    with pytest.raises(CaptureError, match=r"changes model\.count"):
        trained(between)


def test_views_of_slices_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        net.count += 1
        net.other[net.count : net.count + 4].view(2, 2).t().mul_(0.9)
        return h * net.other.clone() + net.other.clone()[net.count : net.count + 8].view(4, 2).t()[1].mean()

    _, captures = trained(between, monkeypatch=monkeypatch)
    assert captures == [0] * 8


@pytest.mark.parametrize("first", [False, True])
def test_a_slice_that_is_another_window_by_chance_is_refused(first: bool) -> None:
    """Both begin at 4 in the first step: one graph has them as one window."""

    def between(net: Net, h: Tensor) -> Tensor:
        net.count += 1
        places = [slice(net.count, net.count + 4), slice(4, 8)]
        with torch.no_grad():
            found = [net.other[place] * 2.0 for place in (places if first else places[::-1])]
        return h * (found[0] - 3 * found[1]).sum()

    with pytest.raises(CaptureError, match=r"changes model\.count"):
        trained(between)
