"""Factories as a user writes them, right and wrong, reached as "tests.models.factories:<name>"."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.errors import CaptureError
from magis.models import OptimizerSpec, Workload

number = 3


def squared(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def as_tuple() -> tuple[nn.Module, Tensor, list[Tensor], object]:
    return nn.Linear(4, 2), torch.randn(3, 4), [torch.randn(3, 2)], squared


def as_workload() -> Workload:
    module = nn.Linear(4, 2)
    tensors = (torch.randn(3, 4),), (torch.randn(3, 2),)
    return Workload("mine", module, *tensors, squared, OptimizerSpec("adam", lr=0.5), blocks=("",))


def bad_optimizer() -> Workload:
    module = nn.Linear(4, 2)
    return Workload("mine", module, (torch.randn(3, 4),), (torch.randn(3, 2),), squared, OptimizerSpec("lion"))


def no_tuple() -> int:
    return 3


def short() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 2), torch.randn(3, 4)


def no_module() -> tuple[object, ...]:
    return "module", torch.randn(3, 4), (), squared


def no_tensors() -> tuple[object, ...]:
    return nn.Linear(4, 2), (torch.randn(3, 4), object()), (), squared


def no_loss() -> tuple[object, ...]:
    return nn.Linear(4, 2), torch.randn(3, 4), (), "mse"


def class_of_module() -> tuple[object, ...]:
    return nn.Linear, torch.ones(2, 3), torch.ones(2, 2), nn.MSELoss()


def compiled() -> tuple[object, ...]:
    module = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    module[0].compile()
    return module, torch.ones(2, 4), torch.ones(2, 2), squared


def takes_a_width(width: int) -> tuple[object, ...]:
    raise AssertionError(width)


def meta() -> tuple[object, ...]:
    return nn.Linear(4, 2, device="meta"), torch.ones(2, 4), torch.ones(2, 2), squared


def class_of_loss() -> tuple[object, ...]:
    return nn.Linear(3, 2), torch.ones(2, 3), torch.ones(2, 2), nn.MSELoss


def class_of_optimizer() -> tuple[object, ...]:
    return nn.Linear(3, 2), torch.ones(2, 3), torch.ones(2, 2), nn.MSELoss(), torch.optim.RMSprop


def fails() -> None:
    raise ValueError("two\nlines")


def leaves() -> None:
    sys.exit(2)


def leaves_without_a_word() -> None:
    sys.exit()


def fails_on_purpose() -> None:
    raise CaptureError("as said")


class Maker:
    @staticmethod
    def make() -> tuple[nn.Module, Tensor, list[Tensor], object]:
        return as_tuple()
