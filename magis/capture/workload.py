"""One training step that has not run yet, and how a module is built on tensors without memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from magis.ops.optimizers import OptimizerSpec

# Builds modules on fake tensors with the code that builds them on real ones.


@contextmanager
def fake_tensors() -> Iterator[None]:
    """`FakeTensorMode`, in which modules are `convertible`."""
    with convertible(), FakeTensorMode():
        yield


@contextmanager
def no_reports() -> Iterator[None]:
    """Hold back torch's own report of a failed fake call: who makes the call says what comes of it."""
    chatter = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, chatter.disabled = chatter.disabled, True
    try:
        yield
    finally:
        chatter.disabled = was_disabled


@contextmanager
def convertible() -> Iterator[None]:
    """`module.double()`, `.to(...)` and the like work on modules of fake tensors as they do on real ones.

    torch exchanges fake parameters with `swap_tensors`, which fails on every tensor that the mode keeps track of:
    "_apply(): Couldn't swap Linear.weight".
    """
    apply: Callable[..., nn.Module] = nn.Module._apply

    def convert(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if not any(isinstance(parameter, FakeTensor) for parameter in self._parameters.values()):
            return apply(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = _converted(parameter, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


def _converted(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """The parameter itself, so that ties and optimizers keep it; a new one on another device, as in torch."""
    with torch.no_grad():
        data = fn(parameter)
        grad = None if parameter.grad is None else fn(parameter.grad)
    if data.device != parameter.device:
        parameter = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:
        parameter.grad = None  # of the old type, which torch would compare with the new one
        parameter.data = data
    parameter.grad = grad
    return parameter


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
