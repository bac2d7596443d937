"""One training step, not run yet: what the rest of magis captures, runs and measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from magis.aten.optimizers import OPTIMIZER_KINDS, OptimizerSpec
from magis.capture.fakes import convertible

__all__ = ["OPTIMIZER_KINDS", "OptimizerSpec", "Workload"]


@dataclass(frozen=True, eq=False)
class Workload:
    """One training step, not run yet: `loss_fn(module(*inputs), *targets)`, its gradients, the optimizer's update.

    The module is in training mode; all tensors are on the CPU, or fake ones where it was built on these. Those of
    magis's own networks are float32 (or integer), those of a user's what they were built as. `to` converts the
    module and the floating-point tensors of the batch.
    """

    name: str
    """The registered name ("bert", "seed-bert") or "package.module:factory"."""
    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Callable[..., Tensor]
    """`loss_fn(output, *targets)`, a scalar."""
    optimizer: OptimizerSpec
    blocks: tuple[str, ...] = ()
    """Paths (`get_submodule`) of the sub-modules that activation checkpointing per block would wrap, in order."""
    explicit_attention: bool = False
    """Whether attention is written out with matmul and softmax, as in the seed variants."""

    @property
    def parts(self) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], Callable[..., Tensor], OptimizerSpec]:
        """What captures and steps are made of, in the order in which they take it."""
        return self.module, self.inputs, self.targets, self.loss_fn, self.optimizer

    def to(self, dtype: str) -> Workload:
        """The same workload with floating-point parameters, buffers and batch of another data type ("bfloat16")."""
        kind = getattr(torch, dtype)

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(kind) if tensor.is_floating_point() else tensor

        with convertible():
            self.module.to(kind)
        return replace(
            self,
            inputs=tuple(convert(t) for t in self.inputs),
            targets=tuple(convert(t) for t in self.targets),
        )
