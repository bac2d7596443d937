"""Techniques of one rank: lower precision, activation checkpointing, offloading, compilation, and combinations.

A name is made of at most one of each kind, joined by "+": "amp+checkpoint", "amp+compile". What a technique changes is
of two sorts: the module's blocks, for as long as the step lives (``wrapped``), and what surrounds forward and loss of
each run (``around``). Both work while a step is captured on fake tensors as well, so that what they need is simulated
exactly, on devices that are not there too. Only compiled code is beyond capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from magis.backend.steps import EagerStep
from magis.capture import Workload
from magis.capture.checkpoint import checkpointed, selectively_checkpointed
from magis.errors import UsageError
from magis.strategies.parts import KINDS, PLANNED_CODE, check_parts, is_local

__all__ = ["BUDGET", "Local", "Moved", "local"]

BUDGET = 0.5
"""What "compile-budget" leaves of the activations that compiled code would keep for the backward."""
CAST = {"amp-bfloat16": "bfloat16", "amp-float16": "float16"}
DEFAULT_CAST = {"cpu": "bfloat16", "cuda": "float16"}
"""What torch.autocast casts to where it is not told, by device type."""


class Moved:
    """What is kept on the host while a step is captured on fake tensors: it leaves the device, and comes back as new
    memory when the backward needs it."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Of both directions together."""

    def away(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.nbytes += tensor.nbytes
        return tensor.shape, tensor.dtype

    def back(self, packed: tuple[torch.Size, torch.dtype]) -> Tensor:
        shape, dtype = packed
        found = torch.empty(shape, dtype=dtype)
        self.nbytes += found.nbytes
        return found


@dataclass(frozen=True)
class Local:
    """A way to run a step on one rank, by its parts; empty ones change nothing."""

    name: str
    device: str
    cast: str = ""
    """ "bfloat16" or "float16": autocast of forward and loss; the latter with scaled gradients."""
    blocks: str = ""
    """ "checkpoint" or "selective-checkpoint"."""
    given: str = ""
    """What forward and loss are autocast to anyway, by the case's own data type."""
    offloads: bool = False
    """Whether tensors kept for the backward wait in host memory."""
    compiled: str = ""
    """ "compile", "compile-budget" or "magis+compile"."""
    limits: tuple[tuple[str, float], ...] = ()
    """Of "magis+compile": options of the backend, ("memory_ratio", 0.8)."""

    group = 1

    @property
    def is_captured(self) -> bool:
        """Whether a step under it can be captured and simulated byte by byte."""
        return not self.compiled

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are scaled: those in float16 would vanish."""
        return self.cast == "float16"

    @property
    def keeps_numbers(self) -> bool:
        """Whether the step computes eager's numbers bit by bit."""
        return not self.cast and not self.compiled

    def check(self, work: Workload) -> None:
        """Raise UsageError for a network that it is not for."""
        if self.blocks and not work.blocks:
            raise UsageError(f"model {work.name!r} names no blocks to checkpoint", hint="list them in Workload.blocks")

    @contextmanager
    def in_capture(self, work: Workload, device: str) -> Iterator[Moved]:
        """The context in which a capture sees the technique at work on a device ("cpu" or "cuda")."""
        self.check(work)
        moved = Moved()
        with ExitStack() as stack:
            stack.enter_context(self.wrapped(work.module, work.blocks))
            if self.offloads and device != "cpu":  # where the host is the device, nothing moves
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(moved.away, moved.back))
            yield moved

    def wrapped(
        self, module: nn.Module, blocks: tuple[str, ...], *, states: bool = True
    ) -> AbstractContextManager[object]:
        """The context in which the module's blocks are under the technique. Without ``states`` nobody keeps those of
        the generator, as in compiled code."""
        if self.blocks == "checkpoint":
            return checkpointed(module, blocks, preserve_rng_state=states)
        if self.blocks:
            return selectively_checkpointed(module, blocks, preserve_rng_state=states)
        return nullcontext()

    @contextmanager
    def around(self) -> Iterator[None]:
        """The context of forward and loss in one run."""
        with ExitStack() as stack:
            if self.cast or self.given:
                stack.enter_context(torch.autocast(self.device, getattr(torch, self.cast or self.given)))
            if self.offloads:
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=self.device == "cuda"))
            if self.compiled == "compile-budget":
                stack.enter_context(_less_kept())
            yield

    def step(self, work: Workload) -> EagerStep:
        """The step of a workload whose module is ``wrapped``."""
        return EagerStep(
            *work.parts,
            explicit_attention=work.explicit_attention,
            around=self.around,
            scaler=torch.amp.GradScaler(self.device) if self.is_scaled else None,
            transform=partial(_compiled, self.limits if self.compiled == PLANNED_CODE else None)
            if self.compiled
            else None,
        )


def local(name: str, device: str, *, memory_ratio: float | None = None, latency_ratio: float | None = None) -> Local:
    """The technique that a name stands for on a device type ("cpu", "cuda").

    The limits are "magis+compile"'s, others take none. Raises UsageError for parts that are unknown, or exclude each
    other.
    """
    if name == PLANNED_CODE:
        asked = (("memory_ratio", memory_ratio), ("latency_ratio", latency_ratio))
        limits = tuple((option, limit) for option, limit in asked if limit is not None)
        return Local(name, device, compiled=name, limits=limits)
    parts = name.split("+")
    check_parts(name)
    unknown = [part for part in parts if not is_local(part)]
    if unknown:
        known = ", ".join(part for kind in KINDS for part in kind)
        raise UsageError(f"strategy {name!r}: unknown part {unknown[0]!r}", hint=f"combine {known}")
    cast, blocks, offload, compiled = (next((part for part in parts if part in kind), "") for kind in KINDS)
    return Local(
        name,
        device,
        CAST.get(cast, DEFAULT_CAST[device]) if cast else "",
        blocks,
        offloads=bool(offload),
        compiled=compiled,
    )


def _compiled(limits: tuple[tuple[str, float], ...] | None, call: Callable[[], Any]) -> Callable[[], Any]:
    torch.compiler.reset()  # codes of earlier steps count against how often one function is compiled
    if limits is not None:  # by its name: the backend is in a layer above this one
        options: dict[str, Any] = {"inductor": True, **dict(limits)}
        return _refusing(torch.compile(call, backend="magis", options=options))
    return _refusing(torch.compile(call))


def _refusing(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same; what the compiler cannot do is one line."""
    from torch._dynamo.exc import TorchDynamoException

    def compiled() -> Any:
        try:
            return call()
        except TorchDynamoException as error:
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UsageError(
                f"torch.compile does not compile the step: {type(error).__name__}: {first}",
                hint="on a CPU inductor needs a C++ compiler (CXX)",
            ) from None

    return compiled


def _less_kept() -> AbstractContextManager[object]:
    from torch._functorch import config

    found: AbstractContextManager[object] = config.patch(activation_memory_budget=BUDGET)
    return found
