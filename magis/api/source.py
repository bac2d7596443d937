"""Where a workload comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from magis.api.affordable import RUNNING_SECONDS
from magis.aten.host_random import seed_all
from magis.capture import Workload


@dataclass(frozen=True)
class Source:
    """Where a workload comes from: a recipe (seed -> workload), and the case's settings that shape it."""

    name: str
    make: Callable[[int], Workload]
    dtype: str
    """What every floating-point tensor is converted to; empty: each stays as it was built."""
    device: str
    seed: int
    of_user: bool = False
    """Whether a user wrote the recipe, which may then do on real tensors what fake ones cannot."""
    reuse: bool = True
    """Whether an operator may take over the memory of an input that dies with it."""
    running_seconds: float = RUNNING_SECONDS
    """How long running a case may take; what takes longer is simulated."""
    seeded: bool = True
    """Whether the step is captured with generators seeded so; else with these as they are."""
    keeps_results: bool = False
    """Whether tensors that the forward leaves in attributes are results of the step."""

    def start(self) -> None:
        """Set the generators as they are when the step begins."""
        if self.seeded:
            seed_all(self.seed)


def own_dtype(workload: Workload) -> str:
    """The data type of the first floating-point parameter, else of such an input; float32 where there is none."""
    for tensor in (*workload.module.parameters(), *workload.inputs):
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return "float32"


def would_change(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether converting a module to a data type would change tensors that have memory behind them."""
    tensors = (*module.parameters(), *module.buffers())
    return any(each.is_floating_point() and each.dtype != dtype and type(each.data) is torch.Tensor for each in tensors)
