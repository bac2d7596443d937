"""Activation checkpointing per block, as PyTorch users write it: the strategy that magis is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def checkpointed(module: nn.Module, blocks: Sequence[str], *, preserve_rng_state: bool = True) -> Iterator[nn.Module]:
    """The module with the forward of each named sub-module under ``torch.utils.checkpoint`` (non-reentrant).

    The module is changed for the duration of the context only. ``preserve_rng_state`` False is for capture, where no
    random numbers are drawn.
    """
    wrapped: list[nn.Module] = []
    for path in blocks:
        block = module.get_submodule(path)
        # On the instance: found before the class's forward, and gone again with one ``del``.
        block.forward = _under_checkpoint(block.forward, preserve_rng_state)
        wrapped.append(block)
    try:
        yield module
    finally:
        for block in wrapped:
            del block.forward


def _under_checkpoint(forward: Callable[..., Any], preserve_rng_state: bool) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=preserve_rng_state)
