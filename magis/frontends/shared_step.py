"""`magis.optimize` on a module that ranks share: the step of its plain twin, then the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.frontends.optimized_step import Choice, OptimizedStep
from magis.frontends.planned import Limits
from magis.strategies.plain_twins import SharedModule

BEHIND = "by the optimizer itself, after the step: ranks share the weights; its state and its step are not counted"


class SharedStep(OptimizedStep):
    """A training step on a module that ranks share. All ranks call it, on batches of one kind."""

    def __init__(
        self,
        model: nn.Module,
        shared: SharedModule,
        loss_fn: Callable[..., Tensor] | None,
        optimizer: Optimizer | None,
        limits: Limits,
        device: str,
        autocast: torch.dtype | None,
    ) -> None:
        self._shared, self._behind = shared, optimizer
        super().__init__(shared.module, loss_fn, None, limits, device, autocast, shared.world)
        self.model = model

    def __call__(self, *batch: Any, **keywords: Tensor) -> Tensor:
        """One step: `step(inputs, targets)` or `step(**keywords)`. Returns the loss of this rank's batch, detached."""
        self._shared.refresh()
        if self._behind is not None:
            self._behind.zero_grad(set_to_none=True)
        loss = super().__call__(*batch, **keywords)
        self._shared.hand_over()
        if self._behind is not None:
            self._behind.step()
            self._behind.zero_grad(set_to_none=True)
        return loss

    def _choose(self) -> Choice:
        if self._behind is None:
            return super()._choose()
        what = (
            "by the optimizer itself, after the step: ranks share the weights; its state and its step are not counted"
        )
        return Choice(what, None)
