"""`magis.optimize`: plan a training step of a user's own loop for less memory, on the loop's module and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from magis import registry
from magis.capture.refusals import check_layouts, check_parts
from magis.capture.workload import Batch, as_batch
from magis.errors import UsageError
from magis.frontends.limits import AUTOCAST, limits_of
from magis.frontends.optimized_step import OptimizedStep
from magis.frontends.optimizer_state import device_of
from magis.models.step_parts import in_one_order, live_parts
from magis.results import Case
from magis.runtime.measure import free_device_memory

__all__ = ["OptimizedStep", "optimize"]

_SHARE = "use a share above 0 and at most 1, or a latency of at least 1"
OLD_ORDER = ("module", "loss", "optimizer", "batch")
HINTS = {"memory_ratio": _SHARE, "latency_ratio": _SHARE, "budget": "use a whole number above 0"}


@in_one_order("magis.optimize", OLD_ORDER, {"model": "module", "loss_fn": "loss", "example_batch": "batch"})
def optimize(
    module: nn.Module | tuple[Any, ...] | Callable[[], object],
    batch: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    *,
    memory_ratio: float | None = None,
    memory_limit: str | int | None = None,
    latency_ratio: float | None = None,
    autocast: torch.dtype | None = None,
    device: str | None = None,
    budget: int | None = None,
    seconds: float | None = None,
    slack: float = Case.slack,
    host_limit: str | int | None = None,
    plan: Path | str | None = None,
    compile: bool = False,  # noqa: A002 (as torch calls it)
) -> OptimizedStep:
    """Return a step that trains `module` in place with less memory: `loss = step(inputs, targets)`.

    The step does what `zero_grad`, `loss(module(*inputs), *targets)`, `backward` and `optimizer.step()` do, with the
    same numbers, under exactly one limit: `memory_ratio` (share of eager's peak), `memory_limit` (bytes, or "8 GiB";
    persistent tensors included) or `latency_ratio` (multiple of eager's predicted latency). Every step reads state and
    learning rates from the optimizer and writes the state back, so that schedulers and `state_dict` work as usual.

    Without an optimizer the step does what `loss.backward()` does: it adds gradients to `.grad`. Clipping, accumulation
    over several batches and the update are left to the loop. Optimizers other than SGD, Adam and AdamW update one
    parameter at a time by their own code within the step; those that treat parameters together, or have hooks or
    patches, are called after the planned forward and backward (`report().update` says so).

    `batch` is an example, `(inputs, targets)`, each a tensor or a tuple of tensors, or a dictionary of the module's
    keywords; tensors may be nested in containers, beside constants (numbers, strings, None). If `loss` is None, the
    module returns its loss, or an output with `.loss`. `module` may also be a tuple of these arguments, or a function
    without arguments that returns one; `step.module` and `step.optimizer` are then taken from it. Batches of another
    shape and a changed module are planned at their first step. `autocast` (torch.bfloat16) replaces a `torch.autocast`
    around forward and loss. `budget` and `seconds` bound each search, `slack` is the share by which swaps may be slower
    than predicted before the step waits. Optimizer state stays in host memory between updates where that keeps the
    limit at less time: at most `host_limit` bytes of it, by default what is free for a GPU, and none for a CPU. `plan`
    is a file that `OptimizedStep.save` wrote. With `compile` (CPU only) inductor compiles what lies between products,
    convolutions and the plan's own actions; numbers are then inductor's.

    A module under `fully_shard` or `DistributedDataParallel` is planned with its collectives: every rank calls this
    function with batches of one shape, one rank searches, and all run its plan. Gradients are stored where these
    wrappers store them, and the optimizer is called after the planned step.

    Raises UsageError for invalid arguments and limits for which no plan is found, CaptureError, naming module and line,
    for a step that is no single static graph.
    """
    given = {"memory_ratio": memory_ratio, "memory_limit": memory_limit, "latency_ratio": latency_ratio}

    def made() -> tuple[OptimizedStep, Batch, str]:
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            what = " and ".join(named) or "none"
            raise UsageError(f"one limit is needed, not {what}", hint=f"give one of {', '.join(given)}")
        asked = {**given, "budget": budget, "seconds": seconds, "slack": slack, "host_limit": host_limit}
        limits = limits_of(asked, HINTS)
        if autocast not in AUTOCAST:
            raise UsageError(f"autocast to {autocast}", hint="use torch.bfloat16 or torch.float16")
        check_layouts(parts.module)
        if plan is not None and not isinstance(plan, str | Path):
            raise UsageError(f"the plan is of type {type(plan).__name__}", hint="give the path of a saved plan")
        trained: nn.Module = parts.module
        place = device_of(trained, device)
        if compile and (shared is not None or place != "cpu"):
            where = "of a module that ranks share" if shared is not None else f"on {place}"
            raise UsageError(f"compile=True for a step {where}", hint="only steps of one CPU are compiled so far")
        if limits.host_limit and (compile or shared is not None):
            what = "compile=True" if compile else "a module that ranks share"
            raise UsageError(
                f"host_limit={host_limit!r} for {what}", hint="its state stays on the device: leave it out"
            )
        if host_limit is None and place == "cuda" and shared is None:
            limits = replace(limits, host_limit=free_device_memory("cpu"))
        limits = replace(limits, compiler=registry.load("compiled", "compiler")() if compile else None)
        step = kind(trained, parts.loss, parts.optimizer, limits, place, autocast)
        return step, as_batch(parts.batch), repr(limits)

    parts = live_parts("magis.optimize", module, batch, loss, optimizer)
    check_parts(parts.module, parts.loss, parts.optimizer)
    shared = _shared_step(parts.module)
    kind: type[OptimizedStep] = OptimizedStep if shared is None else shared
    step, first, _ = made() if shared is None else shared.together(made)
    step.prepare(first, plan)
    return step


def _shared_step(model: nn.Module) -> Any:
    """Return the class of steps for a module that ranks share (`fully_shard`, DDP); None for any other module."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return registry.load("ranks", "shared step")(model)
