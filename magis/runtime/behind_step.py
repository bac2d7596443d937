"""A planned step followed by an optimizer that is not part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from magis.ops import optimizers
from magis.runtime.steps import GraphStep, settle
from magis.runtime.time_slices import TimeSlice, Watched


class BehindStep:
    """A planned step that ends with gradients, followed by the optimizer's own `step()`. Gradients stay in `.grad`
    until `prepare`. ``step`` returns the loss and the gradients of the parameters ``graded``."""

    def __init__(self, step: GraphStep, own: optimizers.OwnOptimizer, graded: Sequence[str]) -> None:
        self.module: nn.Module = step.module
        self.generators: Mapping[str, torch.Generator] = step.generators
        self._step = step
        self._trained = {name: each for name, each in step.module.named_parameters() if each.requires_grad}
        self._optimizer = own.on(self._trained)
        self._graded = tuple(graded)
        self._steps = 0
        self._loss: tuple[Tensor, ...] = ()

    def prepare(self) -> None:
        self._loss = ()
        self._step.prepare()
        for parameter in self._trained.values():
            parameter.grad = None

    def run(self) -> Tensor:
        self._step.run()
        return self._optimizer_step()

    def run_in_turns(self, turn: TimeSlice) -> Tensor:
        self._step.run_in_turns(turn)
        with Watched(turn):
            return self._optimizer_step()

    def _optimizer_step(self) -> Tensor:
        self._step.finish()
        loss, *gradients = self._step.results()
        for name, gradient in zip(self._graded, gradients, strict=True):
            self._trained[name].grad = gradient
        self._optimizer.step()
        self._steps += 1
        self._loss = (loss,)
        return loss

    def settle(self) -> None:
        """Run the optimizer until the step at which its memory is measured."""
        if not self._steps:
            self.prepare()
            self.run()
        self._steps = settle(self._optimizer, self._steps)

    def results(self) -> tuple[Tensor, ...]:
        return (*self._loss, *(each.grad for each in self._trained.values() if each.grad is not None))

    def state(self) -> Mapping[str, Tensor]:
        return optimizers.state_of(self._optimizer, self._trained)
