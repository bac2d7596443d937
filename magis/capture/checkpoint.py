"""Activation checkpointing per block, as PyTorch users write it: strategies that magis is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["SAVED", "checkpointed", "selectively_checkpointed"]

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
"""What selective checkpointing keeps: results of what is dear to compute. All else is computed again."""


@contextmanager
def checkpointed(module: nn.Module, blocks: Sequence[str], *, preserve_rng_state: bool = True) -> Iterator[nn.Module]:
    """The module with the forward of each named sub-module under ``torch.utils.checkpoint`` (non-reentrant).

    The module is changed for the duration of the context only. ``preserve_rng_state`` False is for code that is
    compiled, which keeps no states.
    """
    with _replaced(module, blocks, preserve_rng_state=preserve_rng_state):
        yield module


@contextmanager
def selectively_checkpointed(
    module: nn.Module, blocks: Sequence[str], *, preserve_rng_state: bool = True
) -> Iterator[nn.Module]:
    """The same, but results of products, convolutions and attention (``SAVED``) are kept, not computed again."""
    context_fn = partial(create_selective_checkpoint_contexts, _policy)
    with _replaced(module, blocks, preserve_rng_state=preserve_rng_state, context_fn=context_fn):
        yield module


def _policy(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _replaced(module: nn.Module, blocks: Sequence[str], **options: Any) -> Iterator[None]:
    wrapped: list[nn.Module] = []
    for path in blocks:
        block = module.get_submodule(path)
        # On the instance: found before the class's forward, and gone again with one ``del``.
        block.forward = _under_checkpoint(block.forward, options)
        wrapped.append(block)
    try:
        yield
    finally:
        for block in wrapped:
            del block.forward


def _under_checkpoint(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False, **options)
