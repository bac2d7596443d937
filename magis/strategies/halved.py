"""Mixed precision without autocast, as Megatron-LM has it, under the techniques that otherwise autocast.

Weights, activations and gradients are in the lower type; float32 masters and the optimizer's state beside them. For the
update every gradient is turned into a float32 one, and let go of; the optimizer changes the masters, and the weights
become copies of these. Bytes a parameter with Adam: 2 + 4 + 8 always, 2 at the end of the backward (a bucket's 2 more
under ddp), 4 in its place during the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture import Workload
from magis.strategies.base import RankStep, Technique, World, Wrapping
from magis.strategies.common import LossScaler, half, local, make_optimizer, trained

__all__ = ["Halved", "Masters"]


@dataclass(frozen=True)
class Halved(Wrapping):
    """`half+ddp`, `half+tp2`, `half+pp2`, ...: another technique, in half precision with float32 masters."""

    technique: Technique

    @property
    def name(self) -> str:
        return f"half+{self.technique.name}"

    def prepare(self, work: Workload, world: World) -> RankStep:
        """The inner technique's step on the halved network, with the optimizer on masters."""
        dtype = half(world)
        step: Any = self.technique.prepare(work.to(str(dtype).removeprefix("torch.")), world)
        weights = trained(step.module)
        step.optimizer = Masters(weights, lambda masters: make_optimizer(step.work, masters, self.name))
        step.scale(LossScaler(world, enabled=world.device == "cuda"))
        found: RankStep = step
        return found


class Masters(Optimizer):
    """Trains weights in half precision by way of float32 copies, which ``make`` makes an optimizer of, by name."""

    def __init__(self, weights: Mapping[str, nn.Parameter], make: Callable[[Mapping[str, Tensor]], Optimizer]) -> None:
        super().__init__([{"params": list(weights.values())}], {})
        self._pairs = [(weight, _master(weight)) for weight in weights.values()]
        self._inner = make(dict(zip(weights, (master for _, master in self._pairs), strict=True)))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The update of the masters, by the gradients of the weights, which are gone behind it."""
        loss = None if closure is None else closure()
        for weight, master in self._pairs:
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
            weight.grad = None
        self._inner.step()
        with torch.no_grad():
            for weight, master in self._pairs:
                weight.copy_(master)
                master.grad = None
        return loss

    def held(self) -> list[tuple[str, Tensor]]:
        """Masters, and the state that the optimizer keeps of them, each with its kind."""
        found = [("master weights", local(master)) for _, master in self._pairs]
        for state in self._inner.state.values():
            found += [("optimizer state", local(item)) for item in state.values() if isinstance(item, Tensor)]
        return found


def _master(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().float().clone(), weight.requires_grad)
