"""Operators and arguments of the graph as torch takes them, and one-line errors where it does not."""

from __future__ import annotations

import pytest
import torch

from magis.graph.nodes import Const
from magis.ops.call import constant, from_torch, resolve


def test_resolves_overloads() -> None:
    assert resolve("aten.mm.default") is torch.ops.aten.mm.default
    assert resolve("aten.add_.Tensor") is torch.ops.aten.add_.Tensor


@pytest.mark.parametrize(
    "value",
    [
        torch.float32, torch.bfloat16, torch.bool, torch.strided, torch.contiguous_format, torch.channels_last,
        torch.preserve_format, torch.device("cpu"),
    ],
    ids=str,
)  # fmt: skip
def test_constants_there_and_back(value: object) -> None:
    const = from_torch(value)
    assert isinstance(const, Const)
    assert constant(const, "cpu") == value
