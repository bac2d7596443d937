"""Operators and arguments of the graph as torch takes them, and one-line errors where it does not."""

from __future__ import annotations

import torch

from magis.ops.call import resolve


def test_resolves_overloads() -> None:
    assert resolve("aten.mm.default") is torch.ops.aten.mm.default
    assert resolve("aten.add_.Tensor") is torch.ops.aten.add_.Tensor
