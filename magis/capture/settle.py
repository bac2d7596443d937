"""One forward ahead of the capture, for modules that make some of their state when they are first called."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import nn

from magis.aten.generators import held_generators, own_kept
from magis.aten.host_random import generators_kept
from magis.capture.caches import caches_kept
from magis.capture.hollow import hollow, is_hollow
from magis.capture.workload import Workload

__all__ = ["put_back", "settle", "whole_numbers"]


def settle(work: Workload) -> None:
    """Call module and loss once, so that caches, tables and late buffers are there as in every step but the first.

    Buffers and generators of random numbers are left as they were; a generator that this call makes, as it begins.
    """
    tensors = [*work.module.parameters(), *work.module.buffers()]
    kept = [(buffer, buffer.detach().clone()) for buffer in work.module.buffers() if not is_hollow(buffer)]
    without_memory = any(map(is_hollow, tensors))
    known = held_generators(work.module, work.loss_fn)
    with (
        generators_kept(),
        own_kept(known),
        caches_kept() if without_memory else nullcontext(),
        hollow() if without_memory else nullcontext(),
    ):
        work.loss_fn(work.module(*work.inputs), *work.targets)
        with torch.no_grad():
            for buffer, contents in kept:
                buffer.copy_(contents)
    for name, generator in held_generators(work.module, work.loss_fn).items():
        if name not in known:
            generator.manual_seed(generator.initial_seed())


def whole_numbers(work: Workload) -> list[tuple[nn.Module, str, str, int]]:
    """Whole numbers that are attributes of module or loss: holder, name, name with the holder's path, value."""
    return [
        (part, name, f"{path}.{name}".lstrip("."), value)
        for root in (work.module, work.loss_fn)
        if isinstance(root, nn.Module)
        for path, part in root.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int)
    ]


def put_back(before: Iterable[tuple[nn.Module, str, str, int]], names: Iterable[str]) -> None:
    """Set those numbers that every forward changes (`names`) to what they were: a settling call does not count."""
    changed = frozenset(names)
    for part, name, path, value in before:
        if path in changed:
            vars(part)[name] = value
