"""Tensor parallelism (Shoeybi et al. 2019): attention by heads, feed-forward by inner width, each cut once.

The first projections are cut by rows of their weights (`ColwiseParallel`), the last one by columns
(`RowwiseParallel`), so that each of the two needs one sum over the group in the forward and one in the backward.
Everything else is whole on every rank: embeddings, the vocabulary's projection, norms, the biases behind a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from magis.capture import Workload
from magis.errors import UsageError
from magis.models.attention import FeedForward, SelfAttention
from magis.models.btlm import BtlmLayer
from magis.strategies.distributed import quiet

_FIRST = {FeedForward: ("up",), BtlmLayer: ("up", "gate")}


def share_blocks(work: Workload, group: DeviceMesh) -> None:
    """Cut the attention and feed-forward modules of ``work`` for the ranks of a group. UsageError where none is."""
    ranks = group.size()
    found = 0
    for path, module in work.module.named_modules():
        if isinstance(module, SelfAttention):
            if _is_there(module.out):
                found += 1
                _share_attention(f"{work.name}: {path}", module, group)
        elif type(module) in _FIRST and _is_there(module.down):
            first = _FIRST[type(module)]
            _check(f"{work.name}: the inner width of {path}", _width(work, module.down, path), ranks)
            _parallelize(module, group, {name: ColwiseParallel() for name in first} | {"down": RowwiseParallel()})
    if not found:
        raise UsageError(
            f"{work.name}: tensor parallelism finds no attention to share in {type(work.module).__name__}",
            hint="tp knows the transformers bert, gpt_neo, btlm and vit; use ddp, fsdp or zero for other networks",
        )


def _is_there(layer: nn.Module) -> bool:
    """Whether this rank's stage holds the layer."""
    return getattr(layer, "weight", None) is not None


def _width(work: Workload, layer: nn.Module, path: str) -> int:
    if not isinstance(layer, nn.Linear):
        raise UsageError(f"{work.name}: {path} has a {type(layer).__name__} where tp expects a linear layer")
    return layer.in_features


def _check(what: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise UsageError(f"{what}, {size}, cannot be shared out evenly to {ranks} ranks", hint="use a divisor of it")


def _share_attention(what: str, attention: SelfAttention, group: DeviceMesh) -> None:
    ranks = group.size()
    _check(f"{what}: the number of heads", attention.heads, ranks)
    if not isinstance(attention.out, nn.Linear):
        raise UsageError(f"{what} has a {type(attention.out).__name__} where tp expects a linear layer")
    heads, own = attention.heads, attention.heads // ranks
    if attention.qkv is not None:
        _group_rows(attention.qkv, ranks)
        first = {"qkv": ColwiseParallel()}
    else:
        first = {name: ColwiseParallel() for name in ("query", "key", "value")}
    _parallelize(attention, group, {**first, "out": RowwiseParallel()})
    attention.heads = own
    rank = group.get_local_rank()

    def own_mask(_module: nn.Module, args: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """A mask that differs from head to head (ALiBi's) is cut like the heads."""
        if len(args) < 2 or args[1] is None or args[1].dim() != 4 or args[1].shape[1] != heads:
            return args
        return (args[0], args[1][:, rank * own : (rank + 1) * own], *args[2:])

    attention.register_forward_pre_hook(own_mask)


def _group_rows(packed: nn.Module, ranks: int) -> None:
    """Order the rows of a packed projection by rank first: query, key and value of the first rank's heads, ..."""
    with torch.no_grad():
        for parameter in packed.parameters(recurse=False):
            rows = parameter.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
            parameter.copy_(rows.clone())


def _parallelize(module: nn.Module, group: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    with quiet():
        parallelize_module(module, group, plan)
