"""One forward ahead of the capture, for modules that make some of their state when they are first called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from magis.aten.host_random import generators_kept
from magis.capture.caches import caches_kept
from magis.capture.hollow import hollow, is_hollow
from magis.capture.workload import Workload

__all__ = ["put_back", "settle", "whole_numbers"]


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


def whole_numbers(module: nn.Module) -> dict[str, int]:
    """Whole numbers that are attributes, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) is int
    }


def put_back(module: nn.Module, before: Mapping[str, int], names: Iterable[str]) -> None:
    """Set those of the attributes `names` that were whole numbers `before` to these: a settling call does not count."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        if name in before:
            vars(module.get_submodule(path))[attribute] = before[name]
