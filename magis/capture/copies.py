"""Copies of modules, with what `copy.deepcopy` refuses (results of their last forward) or loses (how weights lie)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

__all__ = ["deep_copy"]


def deep_copy(module: nn.Module) -> nn.Module:
    """`copy.deepcopy`, with plain tensors in place of those that autograd made: the `weight` of `weight_norm`, say.

    Weights that lie in memory with gaps, or in memory of others, do so in the copy: kernels go by the strides.
    """
    made: dict[int, object] = {}
    for part in module.modules():
        for tensor in vars(part).values():
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                made[id(tensor)] = tensor.detach().clone()
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and type(parameter.data) is Tensor and parameter.layout == torch.strided:
            # Of a parameter torch copies the elements, of any other tensor all the memory that it lies in.
            twin = copy.deepcopy(parameter.detach(), made)
            made[id(parameter)] = nn.Parameter(twin, parameter.requires_grad)
    return copy.deepcopy(module, made)
