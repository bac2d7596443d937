"""Weights in half precision, with float32 masters that the optimizer updates: mixed precision without autocast.

As Megatron-LM and Apex (O2) have it: weights, activations and gradients are in the lower type. For the update every
gradient is turned into a float32 one, and let go of (Megatron's way); the optimizer, whose state is float32, changes
the masters, and the weights are copies of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Masters"]


class Masters(Optimizer):
    """Trains weights in half precision by way of float32 copies.

    ``make`` makes the optimizer of the copies, which are given by name. Its groups are this one's.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], make: Callable[[Mapping[str, Tensor]], Optimizer]) -> None:
        self._pairs = [(weight, _master(weight)) for weight in weights.values()]
        self.inner = make(dict(zip(weights, (master for _, master in self._pairs), strict=True)))
        super().__init__([{"params": list(weights.values())}], {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The update of the masters, by the gradients of the weights, which are gone behind it."""
        loss = None if closure is None else closure()
        for weight, master in self._pairs:
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self.inner.step()
        with torch.no_grad():
            for weight, master in self._pairs:
                weight.copy_(master)
                master.grad = None
        return loss

    @property
    def held(self) -> list[tuple[str, Tensor]]:
        """Masters, and the state that the optimizer keeps of them."""
        found: list[tuple[str, Tensor]] = [("master weights", master) for _, master in self._pairs]
        inner: Any = getattr(self.inner, "optim", self.inner)
        for state in inner.state.values():
            found += [("optimizer state", item) for item in state.values() if isinstance(item, Tensor)]
        return found


def _master(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().float().clone(), weight.requires_grad)
