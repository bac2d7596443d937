"""Norms of half-precision inputs with float32 weights: corrected fakes have the types of the kernels' results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from magis.ops.call import as_mixed

A = torch.ops.aten


def run(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = as_mixed(str(func), args, func(*args))
    return out


def batch(x: Tensor, w: Tensor, b: Tensor) -> list[tuple[Tensor, ...]]:
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    y, m, r = found = run(A.native_batch_norm.default, (x, w, b, mean, var, True, 0.1, 1e-5))
    back = (torch.ones_like(y), x, w, mean, var, m, r, True, 1e-5, [True] * 3)
    return [found, run(A.native_batch_norm_backward.default, back)]


def layer(x: Tensor, w: Tensor, b: Tensor) -> list[tuple[Tensor, ...]]:
    x = x.flatten(2).transpose(1, 2).contiguous()
    y, m, r = found = run(A.native_layer_norm.default, (x, [8], w, b, 1e-5))
    return [found, run(A.native_layer_norm_backward.default, (torch.ones_like(y), x, [8], m, r, w, b, [True] * 3))]


def group(x: Tensor, w: Tensor, b: Tensor) -> list[tuple[Tensor, ...]]:
    y, m, r = found = run(A.native_group_norm.default, (x, w, b, 4, 8, 36, 2, 1e-5))
    back = (torch.ones_like(y), x, m, r, w, 4, 8, 36, 2, [True] * 3)
    return [found, run(A.native_group_norm_backward.default, back)]


@pytest.mark.parametrize("norm", [batch, layer, group])
@pytest.mark.parametrize(
    ("inputs", "weights"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_fakes_have_the_types_of_the_kernels(norm: Any, inputs: torch.dtype, weights: torch.dtype) -> None:
    def types() -> list[list[torch.dtype]]:
        x = torch.ones(4, 8, 6, 6, dtype=inputs)
        made = norm(x, torch.ones(8, dtype=weights), torch.zeros(8, dtype=weights))
        return [[tensor.dtype for tensor in each] for each in made]

    with FakeTensorMode():
        fake = types()
    assert fake == types()
