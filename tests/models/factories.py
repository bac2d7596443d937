"""Factories as a user writes them, right and wrong, reached as "tests.models.factories:<name>"."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

number = 3


def squared(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def as_tuple() -> tuple[nn.Module, Tensor, list[Tensor], object]:
    return nn.Linear(4, 2).eval(), torch.randn(3, 4), [torch.randn(3, 2)], squared


def short() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 2), torch.randn(3, 4)


def fails() -> None:
    raise ValueError("two\nlines")


def leaves() -> None:
    sys.exit(2)


class Maker:
    @staticmethod
    def make() -> tuple[nn.Module, Tensor, list[Tensor], object]:
        return as_tuple()
