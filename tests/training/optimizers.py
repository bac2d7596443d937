"""Optimizers of fewer bytes, and of fewer manners, as people write them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

BLOCK = 64


class OfOne(optim.Optimizer):
    """One whose step is a loop over parameters: `move` updates each."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, self.state[parameter], group)

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class SmallLion(OfOne):
    """Lion with its momentum in bfloat16."""

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        momentum = state["exp_avg"].float()
        parameter.add_(momentum.lerp(grad, 0.1).sign_(), alpha=-group["lr"])
        state["exp_avg"].copy_(momentum.lerp_(grad, 0.01))


class HalfAdamW(OfOne):
    """AdamW with moments in bfloat16; it counts steps in Python, and corrects by them."""

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["moments"] = [torch.zeros_like(parameter, dtype=torch.bfloat16) for _ in range(2)]
        state["step"] += 1
        first, second = (each.float() for each in state["moments"])
        first.lerp_(grad, 0.1)
        second.mul_(0.999).addcmul_(grad, grad, value=0.001)
        for kept, now in zip(state["moments"], (first, second), strict=True):
            kept.copy_(now)
        parameter.mul_(1 - group["lr"] * 0.01)
        root = second.div_(1 - 0.999 ** state["step"]).sqrt_().add_(1e-8)
        parameter.addcdiv_(first, root, value=-group["lr"] / (1 - 0.9 ** state["step"]))


class ByteAdam(OfOne):
    """Adam with moments of a byte an element, a scale a block, and a table that all parameters share."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.table = torch.linspace(-1, 1, 255) ** 3

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            blocks = -(-parameter.numel() // BLOCK)
            state["step"] = torch.tensor(0.0)
            for name in ("first", "second"):
                state[name] = torch.full((blocks, BLOCK), 127, dtype=torch.uint8)
                state[f"{name} scale"] = torch.zeros(blocks, 1)
        state["step"] += 1
        first, second = (self.read(state, name, parameter) for name in ("first", "second"))
        first.lerp_(grad, 0.1)
        second.lerp_(grad * grad, 0.001).clamp_(min=0)
        self.write(state, "first", first)
        self.write(state, "second", second)
        step = state["step"].item()
        root = (second.sqrt() / math.sqrt(1 - 0.999**step)).add_(1e-6)
        parameter.addcdiv_(first, root, value=-group["lr"] / (1 - 0.9**step))

    def read(self, state: dict[str, Any], name: str, like: Tensor) -> Tensor:
        whole = self.table[state[name].int()] * state[f"{name} scale"]
        return whole.flatten()[: like.numel()].view_as(like)

    def write(self, state: dict[str, Any], name: str, whole: Tensor) -> None:
        blocks = torch.zeros_like(state[name], dtype=torch.float32)
        blocks.view(-1)[: whole.numel()].copy_(whole.flatten())
        scale = blocks.abs().amax(1, keepdim=True).clamp_(min=1e-12)
        state[f"{name} scale"].copy_(scale)
        state[name].copy_(torch.bucketize(blocks / scale, self.table).clamp_(max=254))


class Counting(OfOne):
    """One that counts steps in its groups and attributes, and writes to gradients."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr, k=0)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
        super().step()

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["total"] = torch.zeros_like(parameter)
        state["total"].add_(grad.mul_(0.5))
        parameter.sub_(state["total"] * (group["lr"] / group["k"] + 1e-4 * self.steps))


# Those whose parameters know of each other.


class Clipped(OfOne):
    """One that clips gradients by the norm of all of them, which Python reads."""

    most = 1e-3

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = math.sqrt(sum(each.norm().item() ** 2 for each in every))
        if norm > self.most:
            for each in every:
                each.mul_(self.most / norm)
        super().step()

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(grad, alpha=group["lr"])


class Normed(Clipped):
    """As `Clipped`, in tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        nn.utils.clip_grad_norm_(every, self.most)
        OfOne.step(self)


class Later(Normed):
    """As `Normed`, but by itself for its first 30 steps."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        (Normed if self.steps > 30 else OfOne).step(self)


class Ranked(Clipped):
    """One whose later parameters move less."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.met = 0
        OfOne.step(self)

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.met += 1
        parameter.sub_(grad, alpha=group["lr"] / self.met)


class Listing(Clipped):
    """One that puts down in a list what it does."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.log: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.log.append(0.5)
        OfOne.step(self)

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(grad, alpha=group["lr"] / len(self.log))


class Noisy(Clipped):
    """One that draws."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        OfOne.step(self)

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(grad + 0.01 * torch.randn_like(grad), alpha=group["lr"])


class Replacing(Clipped):
    """One whose state is another tensor after each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        OfOne.step(self)

    def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["mean"] = grad * 0.1 + state["mean"] * 0.9 if state else grad.clone()
        parameter.sub_(state["mean"], alpha=group["lr"])


def in_two_types(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Adafactor takes its smallest number from the first parameter's data type, for all of a group."""
    return optim.Adafactor(params, lr=0.1)
