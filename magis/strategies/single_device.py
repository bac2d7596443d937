"""Strategies of one rank: precision, activation checkpointing, offloading, compilation, and combinations.

A name has at most one part of each kind, joined by "+": "amp+checkpoint", "amp+compile". A strategy wraps blocks of the
module for the step's lifetime (``wrapped``), and forward and loss of each run (``around``). Both work during a capture
on fake tensors, so that memory is simulated exactly, for absent devices as well. Only compiled code cannot be captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from magis.capture import Workload
from magis.capture.whole_steps import Moved
from magis.errors import UsageError
from magis.runtime.measure import tensor_peak
from magis.runtime.steps import EagerStep
from magis.strategies.chunked_loss import deferred_scores
from magis.strategies.rank_step import batch_size
from magis.strategies.strategy_names import (
    ACCUMULATES,
    BY_HAND,
    CHUNKED_LOSS,
    EARLY_UPDATE,
    KINDS,
    PLANNED_CODE,
    check_parts,
    is_local,
)

_aten = torch.ops.aten
SAVED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Expensive operators, whose outputs selective checkpointing saves; it recomputes all others."""


@contextmanager
def checkpointed(
    module: nn.Module, blocks: Sequence[str], *, selective: bool = False, preserve_rng_state: bool = True
) -> Iterator[nn.Module]:
    """Run the forward of each named block under ``torch.utils.checkpoint`` (non-reentrant) within the context.

    ``selective``: save outputs of products, convolutions and attention (``SAVED``). ``preserve_rng_state``: False for
    code to be compiled, which saves no generator states.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _selective_policy)
    wrapped: list[nn.Module] = []
    for path in blocks:
        block = module.get_submodule(path)
        # An instance attribute hides the class's forward, and one ``del`` removes it.
        block.forward = partial(checkpoint, block.forward, **options)
        wrapped.append(block)
    try:
        yield module
    finally:
        for block in wrapped:
            del block.forward


def _selective_policy(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


BUDGET = 0.5
"""Activation memory budget of "compile-budget", as a fraction of the activations saved by default."""
CAST = {"amp-bfloat16": "bfloat16", "amp-float16": "float16"}
DEFAULT_CAST = {"cpu": "bfloat16", "cuda": "float16"}
"""Default dtype of torch.autocast, by device type."""


def blocks_of(work: Workload) -> tuple[str, ...]:
    """Return the paths of the blocks to checkpoint: those of the workload, else those found in the module.

    Blocks found are two or more children of one class, with children of their own, in the `ModuleList` or `Sequential`
    whose blocks have the most parameters; () without any.
    """
    best: tuple[int, tuple[str, ...]] = (0, ())
    lists = () if work.blocks else work.module.named_modules()
    for path, parent in lists:
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        by_class: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
        for name, child in parent.named_children():
            if any(child.children()):
                by_class.setdefault(type(child), []).append((f"{path}.{name}" if path else name, child))
        for alike in by_class.values():
            size = sum(parameter.numel() for _, child in alike for parameter in child.parameters())
            if len(alike) > 1 and size > best[0]:
                best = (size, tuple(place for place, _ in alike))
    return work.blocks or best[1]


@dataclass(frozen=True)
class Local:
    """A strategy of one rank, by its parts; an empty part changes nothing."""

    name: str
    device: str
    cast: str = ""
    """Autocast dtype of forward and loss: "bfloat16", or "float16" with a GradScaler."""
    blocks: str = ""
    """Checkpointing of blocks: "checkpoint", "selective-checkpoint" or "by-hand"."""
    given: str = ""
    """Autocast dtype set by the case's own data type."""
    offloads: bool = False
    """True if tensors saved for the backward are offloaded to the host."""
    compiled: str = ""
    """Compilation: "compile", "compile-budget" or "magis+compile"."""
    limits: tuple[tuple[str, float], ...] = ()
    """Backend options of "magis+compile": ("memory_ratio", 0.8)."""
    micro_batches: int = 1
    """Parts of the batch whose gradients are added up for one update."""
    chunks_loss: bool = False
    """True if head and loss are computed in chunks of rows."""
    updates_at_once: bool = False
    """True if each weight is updated as soon as its gradient is complete."""

    group = 1

    @property
    def is_captured(self) -> bool:
        """Return True if the step can be captured and simulated byte by byte."""
        return not self.compiled

    @property
    def is_scaled(self) -> bool:
        """Return True if a GradScaler is used: float16 gradients would underflow."""
        return self.cast == "float16"

    @property
    def keeps_numbers(self) -> bool:
        """Return True if results are bitwise equal to eager's."""
        return not self.cast and not self.compiled and not self.chunks_loss and self.micro_batches == 1

    def updates_early(self, work: Workload) -> bool:
        """Return True if weights are updated in the backward. A GradScaler must see all gradients first, and so may an
        optimizer of the user's own."""
        return (
            self.updates_at_once and not self.is_scaled and not work.optimizer.stops and work.optimizer.kind != "none"
        )

    def check(self, work: Workload) -> None:
        """Raise UsageError for a network without blocks to checkpoint, or micro-batches that the strategy cannot add
        up."""
        if self.micro_batches > 1 and batch_size(work) % self.micro_batches:
            what = f"{work.name}: a batch of {batch_size(work)} has no {self.micro_batches} equal micro-batches"
            raise UsageError(what, hint="accumulate as many as divide it")
        if self.micro_batches * work.optimizer.accumulate > 1 and (self.compiled or self.updates_at_once):
            raise UsageError(f"strategy {self.name!r} adds up no micro-batches", hint="leave out accumulate")
        if self.blocks and not blocks_of(work):
            raise UsageError(f"model {work.name!r} names no blocks to checkpoint", hint="list them in Workload.blocks")

    def cut(self, work: Workload) -> Workload:
        """Return the workload in this strategy's micro-batches."""
        if self.micro_batches == 1:
            return work
        return replace(work, optimizer=replace(work.optimizer, accumulate=self.micro_batches, cuts=True))

    def note(self, work: Workload) -> str:
        """Return a caveat about the step; "" without one."""
        own = work.optimizer.own
        if not self.updates_at_once or not (self.is_scaled or own):
            return ""
        who = own.name if own else "a GradScaler"
        return f"{self.name} updates weights behind the backward: {who} may look at all gradients"

    @contextmanager
    def in_capture(self, work: Workload, device: str) -> Iterator[Moved]:
        """Apply the strategy during a capture for a device type ("cpu" or "cuda"); yield the offloading's byte
        count."""
        self.check(work)
        moved = Moved()
        with ExitStack() as stack:
            stack.enter_context(self.wrapped(work.module, blocks_of(work)))
            if self.offloads and device != "cpu":  # a CPU offloads nothing
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(moved.away, moved.back))
            yield moved

    @contextmanager
    def wrapped(self, module: nn.Module, blocks: tuple[str, ...], *, states: bool = True) -> Iterator[None]:
        """Checkpoint the module's blocks within the context; ``states`` False: without saving generator states, as in
        compiled code."""
        with ExitStack() as stack:
            if self.blocks:
                selective = self.blocks == "selective-checkpoint"
                stack.enter_context(checkpointed(module, blocks, selective=selective, preserve_rng_state=states))
            if self.chunks_loss:
                stack.enter_context(deferred_scores(module, blocks))
            yield

    @contextmanager
    def around(self) -> Iterator[None]:
        """Apply autocast, offloading and compiler options to one forward and loss."""
        with ExitStack() as stack:
            if self.cast or self.given:
                stack.enter_context(torch.autocast(self.device, getattr(torch, self.cast or self.given)))
            if self.offloads:
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=self.device == "cuda"))
            if self.compiled == "compile-budget":
                from torch._functorch import config

                stack.enter_context(config.patch(activation_memory_budget=BUDGET))
            yield

    def step(self, work: Workload) -> EagerStep:
        """Return the eager step of a workload whose module is in the context ``wrapped``."""
        return EagerStep(
            *self.cut(work).parts,
            explicit_attention=work.explicit_attention,
            around=self.around,
            scaler=torch.amp.GradScaler(self.device) if self.is_scaled else None,
            transform=self._compile if self.compiled else None,
            early=self.updates_early(work),
        )

    def _compile(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Compile a function; errors of the compiler become a UsageError of one line."""
        from torch._dynamo.exc import TorchDynamoException

        torch.compiler.reset()  # earlier compilations count towards the recompile limit
        if self.compiled == PLANNED_CODE:  # by name: the backend is in a higher layer
            options: dict[str, Any] = {"inductor": True, **dict(self.limits)}
            compiled = torch.compile(call, backend="magis", options=options)
        else:
            compiled = torch.compile(call)

        def run() -> Any:
            try:
                return compiled()
            except TorchDynamoException as error:
                first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                raise UsageError(
                    f"torch.compile does not compile the step: {type(error).__name__}: {first}",
                    hint="on a CPU inductor needs a C++ compiler (CXX)",
                ) from None

        return run


def local(name: str, device: str, *, memory_ratio: float | None = None, latency_ratio: float | None = None) -> Local:
    """Return the strategy of that name for a device type ("cpu", "cuda"); the limits are for "magis+compile" only.
    Raises UsageError for unknown parts, or parts that exclude each other."""
    if name == PLANNED_CODE:
        asked = (("memory_ratio", memory_ratio), ("latency_ratio", latency_ratio))
        limits = tuple((option, limit) for option, limit in asked if limit is not None)
        return Local(name, device, compiled=name, limits=limits)
    several = ACCUMULATES.match(name)
    parts = [part for part in ACCUMULATES.sub("", name, count=1).split("+") if part or several is None]
    check_parts(name)
    unknown = [part for part in parts if not is_local(part)]
    if unknown:
        known = ", ".join(part for kind in KINDS for part in kind)
        raise UsageError(f"strategy {name!r}: unknown part {unknown[0]!r}", hint=f"combine {known}")
    cast, blocks, offload, compiled, chunked, early = (
        next((part for part in parts if part in kind), "") for kind in KINDS
    )
    eager = next((part for part in (blocks, chunked, early) if part in (BY_HAND, CHUNKED_LOSS, EARLY_UPDATE)), "")
    if compiled and eager:
        raise UsageError(f"strategy {name!r}: {eager} is not compiled", hint=f"leave out {compiled}")
    return Local(
        name,
        device,
        CAST.get(cast, DEFAULT_CAST[device]) if cast else "",
        blocks,
        offloads=bool(offload),
        compiled=compiled,
        micro_batches=int(several[1]) if several else 1,
        chunks_loss=bool(chunked) or blocks == BY_HAND,
        updates_at_once=bool(early) or blocks == BY_HAND,
    )


# Memory of compiled code, without compiling: AOTAutograd's forward and backward on fake tensors. Saved tensors are
# those of torch.compile's partitioner with inductor's decompositions, budget included. Inductor fuses operators, so
# that some of the tensors counted here never exist.


def window_of_compiled(strategy: Local, work: Workload) -> int:
    """Return the peak bytes of tensors of a workload's forward and backward, on fake tensors."""
    mode, work = on_fake_tensors(work)

    def whole() -> Any:
        return work.loss_fn(work.module(*work.inputs), *work.targets)

    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    partitioned: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed_nop,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    torch.compiler.reset()
    call = torch.compile(whole, backend=partitioned)
    with mode, strategy.wrapped(work.module, work.blocks, states=False):
        _forward_and_backward(strategy, work, call)  # compiles
        nbytes = tensor_peak(partial(_forward_and_backward, strategy, work, call))
    torch.compiler.reset()
    return nbytes


def on_fake_tensors(work: Workload) -> tuple[FakeTensorMode, Workload]:
    """Return the workload on fake tensors, and their mode: a copy, or itself if all tensors are fake. A mode of fake
    tensors among them, or an active one, is reused."""
    tensors = (*work.module.parameters(), *work.module.buffers(), *work.inputs, *work.targets)
    fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
    active = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]
    mode = fakes[0].fake_mode if fakes else active[-1] if active else FakeTensorMode()
    if len(fakes) == len(tensors):
        return mode, work

    def fake(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor.detach())

    made: dict[int, Tensor] = {}  # the memo of deepcopy, which keeps tied weights tied
    with _disable_current_modes():  # active modes reject real tensors
        for parameter in work.module.parameters():
            made[id(parameter)] = nn.Parameter(fake(parameter), parameter.requires_grad)
        made.update((id(buffer), fake(buffer)) for buffer in work.module.buffers())
        module = copy.deepcopy(work.module, made)
        inputs, targets = tuple(map(fake, work.inputs)), tuple(map(fake, work.targets))
    return mode, replace(work, module=module, inputs=inputs, targets=targets)


def _forward_and_backward(strategy: Local, work: Workload, call: Callable[[], Any]) -> None:
    for parameter in work.module.parameters():
        parameter.grad = None
    with strategy.around():
        loss = call()
    loss.backward()
