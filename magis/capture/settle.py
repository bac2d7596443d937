"""One forward ahead of the capture, for modules that make some of their state when they are first called."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from magis.aten.host_random import generators_kept
from magis.capture.caches import caches_kept
from magis.capture.hollow import hollow, is_hollow
from magis.capture.workload import Workload

__all__ = ["settle"]


def settle(work: Workload) -> None:
    """Call module and loss once, so that caches, tables and late buffers are there as in every step but the first.

    Buffers and generators of random numbers are left as they were.
    """
    tensors = [*work.module.parameters(), *work.module.buffers()]
    kept = [(buffer, buffer.detach().clone()) for buffer in work.module.buffers() if not is_hollow(buffer)]
    without_memory = any(map(is_hollow, tensors))
    with (
        generators_kept(),
        caches_kept() if without_memory else nullcontext(),
        hollow() if without_memory else nullcontext(),
    ):
        work.loss_fn(work.module(*work.inputs), *work.targets)
        with torch.no_grad():
            for buffer, contents in kept:
                buffer.copy_(contents)
