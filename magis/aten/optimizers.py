"""Weight updates written out as the in-place operators that ``torch.optim`` runs without foreach or fusing.

Operator for operator the single-tensor loops of ``torch.optim.SGD`` and ``torch.optim.Adam(W)``, so that captured and
eager steps agree bit for bit and byte for byte. What changes from step to step (learning rate, bias corrections)
appears as named scalars: at capture they are sentinels, numbers that occur nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magis.errors import UsageError


@dataclass(frozen=True)
class OptimizerSpec:
    """The weight update, with the hyper-parameters and defaults of `torch.optim`.

    `kind` "sgd" is `SGD` without momentum, "momentum" `SGD` with it, "adam" and "adamw" are themselves, "gradients"
    stops after the backward and returns the gradients, "none" means inference: neither gradients nor an update.
    """

    kind: str
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZER_KINDS:
            raise UsageError(f"unknown optimizer {self.kind!r}", hint=f"use one of {', '.join(OPTIMIZER_KINDS)}")


OPTIMIZER_KINDS = ("sgd", "momentum", "adam", "adamw", "gradients", "none")
SCALAR_NAMES = ("neg_lr", "neg_step_size", "decay", "bias_correction2_sqrt")
_SENTINEL_BASE = 0.0078125


@dataclass(frozen=True)
class Sentinels:
    """Stand-ins for the step-dependent scalars during capture: name -> number, and back."""

    numbers: Mapping[str, float]

    @property
    def names(self) -> dict[float, str]:
        return {number: name for name, number in self.numbers.items()}


def sentinels() -> Sentinels:
    """Numbers that no module uses by accident: their last bits spell out an index."""
    return Sentinels(
        {name: _SENTINEL_BASE * (1 + (0x3A5F1 + index) * 2.0**-47) for index, name in enumerate(SCALAR_NAMES)}
    )


def state_names(rule: OptimizerSpec) -> tuple[str, ...]:
    """Names of the tensors that the optimizer keeps per parameter, as in ``optimizer.state``."""
    if rule.kind == "momentum":
        return ("momentum_buffer",)
    if rule.kind in ("adam", "adamw"):
        return ("exp_avg", "exp_avg_sq")
    return ()


def scalars(rule: OptimizerSpec, step: int) -> dict[str, float]:
    """Values of the named scalars at a step (1 is the first), computed as ``torch.optim`` does on the host."""
    found = {"neg_lr": -rule.lr}
    if rule.kind in ("adam", "adamw"):
        beta1, beta2 = rule.betas
        # torch.optim counts steps in a float32 tensor and reads it back; exact up to 2**24 steps.
        count = float(step)
        found["neg_step_size"] = -(rule.lr / (1 - beta1**count))
        found["bias_correction2_sqrt"] = (1 - beta2**count) ** 0.5
        found["decay"] = 1 - rule.lr * rule.weight_decay
    return found


def torch_optimizer(rule: OptimizerSpec, params: Sequence[Tensor]) -> torch.optim.Optimizer | None:
    """The same update as an unfused, non-foreach ``torch.optim`` optimizer; None for "gradients" and "none"."""
    if rule.kind in ("gradients", "none"):
        return None
    if rule.kind in ("sgd", "momentum"):
        momentum = rule.momentum if rule.kind == "momentum" else 0.0
        return torch.optim.SGD(params, lr=rule.lr, momentum=momentum, weight_decay=rule.weight_decay, foreach=False)
    cls = torch.optim.AdamW if rule.kind == "adamw" else torch.optim.Adam
    return cls(
        params,
        lr=rule.lr,
        betas=rule.betas,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        foreach=False,
        fused=False,
    )


def update(
    rule: OptimizerSpec,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Sequence[Mapping[str, Tensor]],
    numbers: Mapping[str, float],
) -> None:
    """Run the update; one state mapping per parameter, names as in ``state_names``. Gradients may be missing."""
    if rule.kind in ("gradients", "none"):
        return
    _STEPS[rule.kind](rule, params, grads, states, numbers)


def _sgd(
    rule: OptimizerSpec, params: Sequence[Tensor], grads: Sequence[Tensor | None],
    states: Sequence[Mapping[str, Tensor]], numbers: Mapping[str, float],
) -> None:  # fmt: skip
    for param, grad, state in zip(params, grads, states, strict=True):
        if grad is None:
            continue
        if rule.weight_decay != 0:
            grad = grad.add(param, alpha=rule.weight_decay)  # noqa: PLW2901  (the same name lives as long as in torch)
        if rule.kind == "momentum":
            buffer = state["momentum_buffer"]
            buffer.mul_(rule.momentum).add_(grad, alpha=1)
            grad = buffer  # noqa: PLW2901
        param.add_(grad, alpha=numbers["neg_lr"])


def _adam(
    rule: OptimizerSpec, params: Sequence[Tensor], grads: Sequence[Tensor | None],
    states: Sequence[Mapping[str, Tensor]], numbers: Mapping[str, float],
) -> None:  # fmt: skip
    beta1, beta2 = rule.betas
    for param, grad, state in zip(params, grads, states, strict=True):
        if grad is None:
            continue
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        if rule.weight_decay != 0:
            if rule.kind == "adamw":
                param.mul_(numbers["decay"])
            else:
                grad = grad.add(param, alpha=rule.weight_decay)  # noqa: PLW2901
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denom = (exp_avg_sq.sqrt() / numbers["bias_correction2_sqrt"]).add_(rule.eps)
        param.addcdiv_(exp_avg, denom, value=numbers["neg_step_size"])


_STEPS: dict[str, Callable[..., None]] = {"sgd": _sgd, "momentum": _sgd, "adam": _adam, "adamw": _adam}
