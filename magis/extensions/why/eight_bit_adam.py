"""AdamW whose state is 8-bit blocks, updated by one operator that makes no temporary tensors on a GPU.

As in Dettmers et al., 8-bit Optimizers via Block-wise Quantization (ICLR 2022): blocks of 256 values share one float32
scale, and weights of fewer than 4096 values keep float32 state. Codes are linear: of the first moment by its sign, of
the second moment's square root from 0 on. The operator runs on a CPU, too, where its temporaries are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 256
SMALLEST = 4096
"""Weights with fewer values keep float32 state."""
_CODES = 127
"""Largest code of the first moment; twice that, of the second."""


_STATE = ("first", "second", "first_scale", "second_scale")


@torch.library.custom_op(
    "magis::adamw_8bit_", mutates_args=("weights", "small", *_STATE, "small_first", "small_second")
)
def adamw_8bit_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    first_scale: Sequence[Tensor],
    second_scale: Sequence[Tensor],
    small: Sequence[Tensor],
    small_grads: Sequence[Tensor],
    small_first: Sequence[Tensor],
    small_second: Sequence[Tensor],
    numbers: Sequence[float],
    coupled: bool,
) -> None:
    """Update weights and their state, one after the other: of n values, codes (int8 and uint8) and scales of blocks; of
    small weights, float32 moments. Numbers: learning rate, betas, eps, weight decay, number of the step."""
    rates = numbers[1:3]
    for weight, grad, *state in zip(weights, grads, first, second, first_scale, second_scale, strict=True):
        m, root = _spread(state[0], state[2], _CODES), _spread(state[1], state[3], 2 * _CODES)
        m, v = _moments(weight, grad, m, root.square(), rates, numbers[4] if coupled else 0.0)
        for codes, scale, values, most in ((state[0], state[2], m, _CODES), (state[1], state[3], v.sqrt(), 2 * _CODES)):
            scale.copy_(_blocks(values).abs().amax(dim=1))
            shares = _blocks(values) / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
            codes.copy_((shares * most).round().flatten()[: codes.numel()])
        _move(weight, m, v, numbers, coupled=coupled)
    for weight, grad, *moments in zip(small, small_grads, small_first, small_second, strict=True):
        m, v = _moments(weight, grad, moments[0].flatten(), moments[1].flatten(), rates, numbers[4] if coupled else 0.0)
        for moment, values in zip(moments, (m, v), strict=True):
            moment.copy_(values.view_as(moment))
        _move(weight, m, v, numbers, coupled=coupled)


def _moments(
    weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, betas: Sequence[float], decay: float
) -> tuple[Tensor, Tensor]:
    """Return both moments after a gradient."""
    slope = grad.flatten().float() + decay * weight.flatten().float()
    return torch.lerp(m, slope, 1 - betas[0]), betas[1] * v + (1 - betas[1]) * slope.square()


def _move(weight: Tensor, m: Tensor, v: Tensor, numbers: Sequence[float], *, coupled: bool) -> None:
    """Update a weight by its moments."""
    lr, beta1, beta2, eps, decay, step = numbers
    move = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
    kept = weight.flatten().float() * (1.0 if coupled else 1 - lr * decay)
    weight.copy_((kept - lr * move).view_as(weight))


@adamw_8bit_.register_fake
def _returns_nothing(*_args: object) -> None:
    """Nothing is returned."""


def _blocks(values: Tensor) -> Tensor:
    """Return n values as [blocks, BLOCK], filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _spread(codes: Tensor, scale: Tensor, most: int) -> Tensor:
    """Return the values that codes stand for."""
    found: Tensor = (_blocks(codes.float()) * (scale / most).unsqueeze(1)).flatten()[: codes.numel()]
    return found


class EightBitAdam(Optimizer):
    """Adam, or AdamW if ``decoupled``, with 8-bit state."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights that have gradients."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            graded = [weight for weight in group["params"] if weight.grad is not None]
            for weight in graded:
                if not self.state[weight]:
                    self.state[weight].update(_new_state(weight))
            group["step"] = group.get("step", 0) + 1
            numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"], float(group["step"])]
            lists = list[list[Any]]()
            for names in (_STATE, _STATE[:2]):
                mine = [weight for weight in graded if len(self.state[weight]) == len(names)]
                lists += [mine, [weight.grad for weight in mine]]
                lists += [[self.state[weight][name] for weight in mine] for name in names]
            adamw_8bit_(*lists, numbers, not group["decoupled"])
        return loss


def _new_state(weight: Tensor) -> dict[str, Tensor]:
    """Return zeros: codes and scales of blocks, or float32 moments of a small weight."""
    n, device = weight.numel(), weight.device
    if n < SMALLEST:
        return {name: torch.zeros(weight.shape, dtype=torch.float32, device=device) for name in ("first", "second")}
    blocks = -(-n // BLOCK)
    return {
        "first": torch.zeros(n, dtype=torch.int8, device=device),
        "second": torch.zeros(n, dtype=torch.uint8, device=device),
        "first_scale": torch.zeros(blocks, dtype=torch.float32, device=device),
        "second_scale": torch.zeros(blocks, dtype=torch.float32, device=device),
    }
