"""Attention by heads if the ranks do not divide the number of heads: the first ranks have one head more.

Torch's DTensors chunk a dimension evenly, with a smaller last chunk: 3 heads of 16 rows on 2 ranks would be 24 and 24
rows, which splits a head. So here each rank holds plain parts of 32 and 16 rows, with the two collectives of
Megatron-LM at both ends (Shoeybi et al. 2019):

    query, key, value    forward: own heads of a whole input       backward: all-reduce of the input's gradient
    out                  forward: all-reduce of the products       backward: own heads of a whole gradient

A rank with more heads draws more random numbers for dropout in attention, and then the ranks' generators would differ.
So attention draws from its own generator, seeded from the common one; Megatron-LM has two generators, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from magis.ops.collectives import all_reduce
from magis.ops.generators import drawing_apart


def head_shares(heads: int, ranks: int) -> list[int]:
    """Return the number of heads of each rank."""
    each, over = divmod(heads, ranks)
    return [each + (rank < over) for rank in range(ranks)]


def share_rows(layer: nn.Module, columns: Sequence[int], rank: int, group: str, *, packed: int = 1) -> None:
    """Reduce a linear layer to the rows (output features) of this rank's heads.

    ``columns``: width of each rank's heads; ``packed``: number of projections in the layer, each of which is cut.
    """
    for name, whole in list(layer.named_parameters(recurse=False)):
        parts = [each.split(list(columns))[rank] for each in whole.detach().chunk(packed)]
        layer.register_parameter(name, nn.Parameter(torch.cat(parts), whole.requires_grad))
    layer.forward = partial(_rows_forward, layer, group)


def share_columns(layer: nn.Module, columns: Sequence[int], rank: int, group: str) -> None:
    """Reduce a linear layer to the columns (input features) of this rank's heads; its bias stays whole."""
    whole: Any = layer.weight
    part = whole.detach().split(list(columns), 1)[rank].contiguous().clone()
    layer.register_parameter("weight", nn.Parameter(part, whole.requires_grad))
    layer.forward = partial(_columns_forward, layer, group)


def draw_alike(attention: nn.Module) -> None:
    """Make an attention draw from its own generator, so that all ranks draw the same numbers after it."""
    vars(attention)["forward"] = partial(_draw_apart, attention)  # deepcopy rebinds the partial to the copy


def _draw_apart(attention: Any, *args: Any, **kwargs: Any) -> Any:
    x = args[0] if args else next(iter(kwargs.values()))
    rate = getattr(attention, "dropout", None) or getattr(attention, "attention_dropout", None)
    with drawing_apart(x.device) if attention.training and rate else nullcontext():
        return type(attention).forward(attention, *args, **kwargs)


def _rows_forward(layer: Any, group: str, x: Tensor) -> Tensor:
    own = x.to_local() if isinstance(x, DTensor) else x
    return functional.linear(_Entering.apply(own, group), layer.weight, layer.bias)  # type: ignore[no-untyped-call]


def _columns_forward(layer: Any, group: str, x: Tensor) -> Tensor:
    found: Tensor = _Leaving.apply(functional.linear(x, layer.weight), group)  # type: ignore[no-untyped-call]
    return found if layer.bias is None else found + layer.bias


class _Entering(torch.autograd.Function):
    """Identity in the forward; all-reduce of gradients (sum) in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].contiguous(), "sum", ctx.group), None


class _Leaving(torch.autograd.Function):
    """All-reduce (sum) in the forward; identity in the backward."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
