"""Builds modules on fake tensors with the code that builds them on real ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["convertible", "fake_tensors", "no_reports"]


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
