"""What a model hands to the rest of magis: a module, one batch, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["OPTIMIZER_KINDS", "OptimizerSpec", "Workload"]

OPTIMIZER_KINDS = ("sgd", "momentum", "adam", "adamw", "none")


@dataclass(frozen=True)
class OptimizerSpec:
    """The weight update, with the hyper-parameters and defaults of `torch.optim`.

    `kind` "sgd" is `SGD` without momentum, "momentum" `SGD` with it, "adam" and "adamw" are themselves,
    "none" means inference: neither gradients nor an update.
    """

    kind: str
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, eq=False)
class Workload:
    """One training step, not run yet: `loss_fn(module(*inputs), *targets)`, its gradients, the optimizer's
    update.

    The module is in training mode; all tensors are float32 (or integer) on the CPU, or fake ones where it
    was built under `FakeTensorMode`. Whoever wants another data type converts the module and the
    floating-point tensors among `inputs` and `targets`.
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
    """Paths (`get_submodule`) of the sub-modules that checkpointing per block would wrap, in order."""
    explicit_attention: bool = False
    """Whether attention is written out with matmul and softmax, as in the seed variants."""
