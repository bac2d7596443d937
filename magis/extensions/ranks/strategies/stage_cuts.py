"""Cuts of networks into pipeline stages, and into tensor-parallel parts (Shoeybi et al. 2019).

A cut network runs a start (embeddings), its blocks and a finish (heads, logits); only the hidden state goes from stage
to stage. The functions repeat the `forward` of their networks; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from magis.capture import Workload
from magis.errors import UsageError
from magis.extensions.models.building import FeedForward, SelfAttention
from magis.extensions.models.decoders import Btlm, BtlmLayer, Gpt, GptNeo
from magis.extensions.models.encoders import Bert, Vit
from magis.extensions.ranks.strategies.distributed import quiet
from magis.extensions.ranks.strategies.uneven_heads import draw_alike, head_shares, share_columns, share_rows


@dataclass(frozen=True)
class StageCut:
    """Functions that run a network in parts; each takes the network, whole or with only its part's parameters."""

    start: Callable[[Any, tuple[Tensor, ...]], Tensor]
    """Function from the inputs to the first hidden state."""
    block: Callable[[Any, int, Tensor], Tensor]
    """Function from a block's number and input to its output."""
    finish: Callable[[Any, Tensor], Any]
    """Function from the last hidden state to the output."""
    starts: tuple[str, ...]
    """Prefixes of the names of the start's parameters; those in no block either belong to the finish."""
    tied: str = ""
    """Parameter that start and finish share: both ends hold a copy, and add up its gradients."""


def cut_of(work: Workload, stages: int, ranks: int | None = None) -> StageCut:
    """Return the cut of the network of ``work``; raises UsageError if it is not known or has too few blocks.

    ``ranks``: number of ranks that hold the stages, if not one stage each.
    """
    cut = _CUTS.get(type(work.module))
    if cut is None:
        raise UsageError(
            f"{work.name}: pipeline stages need to know where to cut, and {type(work.module).__name__} says nothing",
            hint="pp knows bert, gpt, gpt_neo, btlm and vit; use ddp, fsdp or zero for other networks",
        )
    if stages > (most := len(work.blocks)):
        each = stages // (ranks or stages)  # on a rank
        plain = f", or the {ranks} stages of pp{ranks}" if each > 1 and ranks and ranks <= most else ""
        raise UsageError(
            f"{work.name}: {most} blocks cannot be cut into {stages} stages"
            + (f", {each} on each of {ranks} ranks" if each > 1 else ""),
            hint=f"take a network of at least {stages} blocks{plain}" if each > 1 else f"ask for at most {most} stages",
        )
    return cut


def run_stage(net: nn.Module, cut: StageCut, blocks: range, given: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Run the blocks of a stage on the hidden state before them, or on the inputs of the network."""
    x = given if isinstance(given, Tensor) else cut.start(net, given)
    for index in blocks:
        x = cut.block(net, index, x)
    return x


def stage_blocks(count: int, stages: int, stage: int) -> range:
    """Return the numbers of the blocks of a stage: equal counts, with one more in the first stages if need be."""
    each, over = divmod(count, stages)
    first = stage * each + min(stage, over)
    return range(first, first + each + (stage < over))


def keep_stages(work: Workload, cut: StageCut, stages: int, held: Collection[int]) -> None:
    """Drop the parameters that none of the stages ``held`` needs; names stay, and modules without parameters."""
    own = {f"{work.blocks[index]}." for stage in held for index in stage_blocks(len(work.blocks), stages, stage)}
    first, last = 0 in held, stages - 1 in held
    blocks = tuple(f"{block}." for block in work.blocks)
    for name in [name for name, _ in work.module.named_parameters(remove_duplicate=False)]:
        if name.startswith(blocks):
            kept = name.startswith(tuple(own))
        elif name.startswith(cut.starts):
            kept = first or (name == cut.tied and last)
        else:
            kept = last
        if not kept:
            owner, _, leaf = name.rpartition(".")
            module: nn.Module = work.module.get_submodule(owner)
            module._parameters[leaf] = None


def _bert_start(net: Bert, inputs: tuple[Tensor, ...]) -> Tensor:
    out: Tensor = net.embeddings(*inputs)
    return out


def _bert_finish(net: Bert, x: Tensor) -> tuple[Tensor, Tensor]:
    sentence = net.next_sentence(torch.tanh(net.pooler(x[:, 0])))
    x = net.transform_norm(net.transform_activation(net.transform(x)))
    return functional.linear(x, net.embeddings.word.weight, net.decoder_bias), sentence


def _neo_start(net: GptNeo | Gpt, inputs: tuple[Tensor, ...]) -> Tensor:
    x = net.word(inputs[0])
    if net.position is not None:
        x = x + net.position(torch.arange(inputs[0].shape[1], device=inputs[0].device))
    out: Tensor = net.dropout(x)
    return out


def _neo_block(net: GptNeo, index: int, x: Tensor) -> Tensor:
    out: Tensor = net.layers[index](x, net.global_mask if index % 2 == 0 else net.local_mask)
    return out


def _neo_finish(net: GptNeo | Gpt, x: Tensor) -> Tensor:
    return functional.linear(net.norm(x), net.word.weight)


def _masked_block(net: Gpt | Btlm, index: int, x: Tensor) -> Tensor:
    out: Tensor = net.layers[index](x, net.mask)
    return out


def _btlm_start(net: Btlm, inputs: tuple[Tensor, ...]) -> Tensor:
    out: Tensor = net.word(inputs[0]) * net.embedding_scale
    return out


def _btlm_finish(net: Btlm, x: Tensor) -> Tensor:
    return functional.linear(net.norm(x) * net.output_scale, net.word.weight)


def _vit_start(net: Vit, inputs: tuple[Tensor, ...]) -> Tensor:
    x = net.patches(inputs[0]).flatten(2).transpose(1, 2)
    x = torch.cat([net.class_token.expand(x.shape[0], -1, -1), x], dim=1)
    if net.positions is not None:
        x = x + net.positions
    out: Tensor = net.dropout(x)
    return out


def _vit_finish(net: Vit, x: Tensor) -> Tensor:
    out: Tensor = net.head(net.norm(x)[:, 0])
    return out


def _plain_block(net: Any, index: int, x: Tensor) -> Tensor:
    out: Tensor = net.layers[index](x)
    return out


_CUTS: dict[type[nn.Module], StageCut] = {
    Bert: StageCut(_bert_start, _plain_block, _bert_finish, ("embeddings.",), "embeddings.word.weight"),
    GptNeo: StageCut(_neo_start, _neo_block, _neo_finish, ("word.", "position."), "word.weight"),
    Gpt: StageCut(_neo_start, _masked_block, _neo_finish, ("word.", "position."), "word.weight"),
    Btlm: StageCut(_btlm_start, _masked_block, _btlm_finish, ("word.",), "word.weight"),
    Vit: StageCut(_vit_start, _plain_block, _vit_finish, ("patches.", "class_token", "positions")),
}


# Tensor parallelism (Shoeybi et al. 2019): attention by heads, feed-forward by inner width, each cut once.
# The first projections are cut by rows of their weights (`ColwiseParallel`), the last one by columns
# (`RowwiseParallel`), so that each of the two needs one sum over the group in the forward and one in the backward.
# The vocabulary is cut in `vocabulary.py`. Everything else is whole on every rank: other embeddings, norms, the biases
# behind a sum.

_FIRST = {FeedForward: ("up",), BtlmLayer: ("up", "gate")}


def share_blocks(work: Workload, group: DeviceMesh, *, sequence: bool = False) -> None:
    """Cut the attention and feed-forward modules of ``work`` for the ranks of a group; raises UsageError if none is.

    ``sequence``: they return parts of the sequence (`sequence_parts.py`).
    """
    ranks, last = group.size(), RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    found = 0
    for path, module in work.module.named_modules():
        if isinstance(module, SelfAttention):
            if _is_there(module.out):
                found += 1
                _share_attention(f"{work.name}: {path}", module, group, last)
        elif type(module) in _FIRST and _is_there(module.down):
            first = _FIRST[type(module)]
            if not isinstance(module.down, nn.Linear):
                kind = type(module.down).__name__
                raise UsageError(f"{work.name}: {path} has a {kind} where tp expects a linear layer")
            if module.down.in_features % ranks:
                width = f"{work.name}: the inner width of {path}, {module.down.in_features}"
                hint = "use a divisor of it"
                raise UsageError(f"{width}, cannot be shared out evenly to {ranks} ranks", hint=hint)
            _parallelize(module, group, {name: ColwiseParallel() for name in first} | {"down": last})
    if not found:
        raise UsageError(
            f"{work.name}: tensor parallelism finds no attention to share in {type(work.module).__name__}",
            hint="tp knows the transformers bert, gpt, gpt_neo, btlm and vit; use ddp, fsdp or zero for other networks",
        )


def _is_there(layer: nn.Module) -> bool:
    """Return True if this rank's stage holds the layer."""
    return getattr(layer, "weight", None) is not None


def _share_attention(what: str, attention: SelfAttention, group: DeviceMesh, last: ParallelStyle) -> None:
    ranks, rank, heads = group.size(), group.get_local_rank(), attention.heads
    if heads < ranks:
        raise UsageError(f"{what}: {heads} heads are too few for {ranks} ranks", hint="share them out to fewer ranks")
    if not isinstance(attention.out, nn.Linear):
        raise UsageError(f"{what} has a {type(attention.out).__name__} where tp expects a linear layer")
    shares = head_shares(heads, ranks)
    if heads % ranks:
        _share_unevenly(attention, [attention.head_width * share for share in shares], group)
    elif attention.qkv is not None:
        _group_rows(attention.qkv, ranks)
        _parallelize(attention, group, {"qkv": ColwiseParallel(), "out": last})
    else:
        first = {name: ColwiseParallel() for name in ("query", "key", "value")}
        _parallelize(attention, group, {**first, "out": last})
    attention.heads = shares[rank]
    low, high = sum(shares[:rank]), sum(shares[: rank + 1])

    def own_mask(_module: nn.Module, args: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Cut a mask that differs from head to head (ALiBi's) like the heads."""
        if len(args) < 2 or args[1] is None or args[1].dim() != 4 or args[1].shape[1] != heads:
            return args
        return (args[0], args[1][:, low:high], *args[2:])

    attention.register_forward_pre_hook(own_mask)


def _share_unevenly(attention: SelfAttention, columns: Sequence[int], group: DeviceMesh) -> None:
    rank, name = group.get_local_rank(), group.get_group().group_name
    if attention.qkv is not None:
        share_rows(attention.qkv, columns, rank, name, packed=3)
    else:
        for layer in (attention.query, attention.key, attention.value):
            share_rows(layer, columns, rank, name)
    share_columns(attention.out, columns, rank, name)
    draw_alike(attention)


def _group_rows(packed: nn.Module, ranks: int) -> None:
    """Order the rows of a packed projection by rank first: query, key and value of the first rank's heads, ..."""
    with torch.no_grad():
        for parameter in packed.parameters(recurse=False):
            rows = parameter.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
            parameter.copy_(rows.clone())


def _parallelize(module: nn.Module, group: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    with quiet():
        parallelize_module(module, group, plan)
