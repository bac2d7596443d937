"""LoRA adapters in the linear layers of a network, whose own weights are frozen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from magis.capture import Workload
from magis.capture.python_state import deep_copy
from magis.errors import UsageError
from magis.planner.bench import Make

ADAPTER_RANK = 8


class Adapter(nn.Module):
    """The product of two thin matrices that is added to a layer's output: rows of width ``inputs`` -> ``outputs``."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        made = partial(torch.empty, dtype=weight.dtype, device=weight.device)
        self.down, self.up = nn.Parameter(made(rank, inputs)), nn.Parameter(made(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added for the rows `x`, scaled by 1."""
        return nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def with_adapters(make: Make, seed: int) -> Workload:
    """Return the workload with a trainable adapter in each linear layer and all else frozen; its modules are copies.

    Raises UsageError for a network without linear layers, and for an optimizer that is not part of the step."""
    work = make(seed)
    if work.optimizer.own is not None:
        raise UsageError(f"{work.name}: its optimizer runs by itself")
    module = deep_copy(work.module)
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    if not layers:
        raise UsageError(f"{work.name}: no linear layer takes an adapter")
    module.requires_grad_(False)
    for layer in layers:
        layer.adapter = Adapter(layer.weight, ADAPTER_RANK)
        layer.forward = partial(_adapted, layer.forward, layer.adapter)  # type: ignore[method-assign]
    return replace(work, module=module, optimizer=replace(work.optimizer, groups=()))


def _adapted(forward: Callable[[Tensor], Tensor], adapter: Adapter, x: Tensor) -> Tensor:
    return forward(x).add(adapter(x))
