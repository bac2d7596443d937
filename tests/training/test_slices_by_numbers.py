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
