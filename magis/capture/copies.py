"""Copies of modules that hold results of their last forward, which torch refuses to copy."""

from __future__ import annotations

import copy

from torch import Tensor, nn

__all__ = ["deep_copy"]


def deep_copy(module: nn.Module) -> nn.Module:
    """`copy.deepcopy`, with plain tensors in place of those that autograd made: the `weight` of `weight_norm`, say."""
    made: dict[int, object] = {}
    for part in module.modules():
        for tensor in vars(part).values():
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                made[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(module, made)
