"""`magis.optimize` on a module under DDP or FSDP: the planned step of its plain twin, then the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture.workload import Batch, as_batch
from magis.errors import UsageError
from magis.extensions.ranks.plans.agreed_plans import Ranks, attempt, check_same, tell_all
from magis.extensions.ranks.plans.plain_twins import is_shared, shared_module
from magis.frontends.kept_steps import Choice
from magis.frontends.limits import Limits
from magis.frontends.optimized_step import OptimizedStep
from magis.frontends.optimizer_state import check_hooks, check_optimizer, trained_parameters
from magis.ops.generators import held_generators
from magis.strategies.rank_step import World

BEHIND = "by the optimizer itself, after the step: ranks share the weights; its state and its step are not counted"

Made: TypeAlias = tuple[OptimizedStep, Batch, str]
"""Step, its first batch, and its limits in words."""


def shared_step(model: nn.Module) -> type[SharedStep] | None:
    """Return the step class for a module under DDP or FSDP; None for any other module."""
    return SharedStep if is_shared(model) else None


class SharedStep(OptimizedStep):
    """Training step on a module under DDP or FSDP; all ranks call it together, with batches of equal shape."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        optimizer: Optimizer | None,
        limits: Limits,
        device: str,
        autocast: torch.dtype | None,
    ) -> None:
        self._shared, self._behind = shared_module(model), optimizer
        if optimizer is not None:
            check_optimizer(optimizer, trained_parameters(model))
        check_hooks(trained_parameters(model))
        super().__init__(self._shared.module, loss_fn, None, limits, device, autocast, Ranks(self._shared.world))
        self.module = model
        check_module(self._whole, self._loss_fn)

    @classmethod
    def together(cls, made: Callable[[], Made]) -> Made:
        """Create the step on every rank. Raises MagisError on all ranks if it fails on one."""
        ranks = Ranks(World(dist.get_world_size(), dist.get_rank()))
        found = ranks.all_or_none("step", made)
        check_same("limit", tell_all("limit", "", found[2], ranks.world), [0] * ranks.world.size)
        return found

    def __call__(self, *batch: Any, **keywords: Any) -> Tensor:
        """Run `step(inputs, targets)` or `step(**keywords)`, and return the detached loss of this rank's batch."""
        given = as_batch(keywords or (batch[0] if len(batch) == 1 else batch))
        self._agree(given)
        if self._behind is not None:
            self._behind.zero_grad(set_to_none=True)
        loss = super().__call__(*batch, **keywords)
        self._shared.hand_over()
        if self._behind is not None:
            self._behind.step()
            self._behind.zero_grad(set_to_none=True)
        return loss

    def _agree(self, batch: Batch) -> None:
        """Refresh the twin from the model's current state, on all ranks or on none.

        Raises MagisError on all ranks if one cannot refresh, or if only some ranks have a plan for their batch. Ranks
        compare this on a CPU only, since a GPU would have to wait for its queue.
        """
        line = attempt(self._refresh)
        if self._device != "cpu":
            if line:
                raise UsageError(line)
            return
        missed = int(not line and self._find(batch, self._key(batch)) is None)
        states = torch.tensor([missed, 1 - missed, int(bool(line))])
        dist.all_reduce(states, dist.ReduceOp.MAX)
        some_miss, some_hit, fails = states.tolist()
        if fails:
            tell_all("step", line, "", self._shared.world)
        if some_miss and some_hit:
            raise UsageError(
                "some ranks have a batch of a kind that was not planned yet, others have not",
                hint="give all ranks batches of one kind; leave out a last one that is shorter (drop_last)",
            )

    def _refresh(self) -> str:
        self._shared.refresh()
        check_hooks(trained_parameters(self.module))
        return ""

    def _choose(self) -> Choice:
        return super()._choose() if self._behind is None else Choice(BEHIND, None)


def check_module(module: nn.Module, loss_fn: Callable[..., Tensor] | None) -> None:
    """Raise UsageError for a module with its own random generator: the planned copy would draw from another one."""
    if held_generators(module, loss_fn):
        raise UsageError(
            "the model holds a random generator of its own, and what is planned is a copy of it",
            hint="draw from torch's default generator",
        )
