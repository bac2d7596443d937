"""Where the networks of `magis.models` can be cut into stages, one after another.

A cut network runs a start (embeddings), its blocks and a finish (heads, logits); what goes from stage to stage is the
hidden state alone. The functions repeat the `forward` of their networks; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture import Workload
from magis.errors import UsageError
from magis.models.bert import Bert
from magis.models.btlm import Btlm
from magis.models.gpt import Gpt, GptNeo
from magis.models.vit import Vit


@dataclass(frozen=True)
class StageCut:
    """How to run a network in parts. Each function gets the network, whole or with only its part's parameters."""

    start: Callable[[Any, tuple[Tensor, ...]], Tensor]
    """Inputs to the first hidden state."""
    block: Callable[[Any, int, Tensor], Tensor]
    """Through the block of that number."""
    finish: Callable[[Any, Tensor], Any]
    """The last hidden state to the output."""
    starts: tuple[str, ...]
    """Beginnings of the names of the parameters of the start; what is in no block either belongs to the finish."""
    tied: str = ""
    """The parameter that start and finish share: both ends hold a copy, and add up its gradients."""


def cut_of(work: Workload, stages: int) -> StageCut:
    """How to cut the network of ``work``; UsageError where that is not known or not possible."""
    cut = _CUTS.get(type(work.module))
    if cut is None:
        raise UsageError(
            f"{work.name}: pipeline stages need to know where to cut, and {type(work.module).__name__} says nothing",
            hint="pp knows bert, gpt, gpt_neo, btlm and vit; use ddp, fsdp or zero for other networks",
        )
    if stages > len(work.blocks):
        raise UsageError(
            f"{work.name}: {len(work.blocks)} blocks cannot be cut into {stages} stages",
            hint=f"ask for at most {len(work.blocks)} stages",
        )
    return cut


def stage_blocks(count: int, stages: int, stage: int) -> range:
    """The numbers of the blocks of a stage: equal counts, one more in the first ones where that does not go."""
    each, over = divmod(count, stages)
    first = stage * each + min(stage, over)
    return range(first, first + each + (stage < over))


def keep_stage(work: Workload, cut: StageCut, stages: int, stage: int) -> None:
    """Drop the parameters that other stages hold; names stay, and modules without parameters."""
    own = {f"{work.blocks[index]}." for index in stage_blocks(len(work.blocks), stages, stage)}
    blocks = tuple(f"{block}." for block in work.blocks)
    for name in [name for name, _ in work.module.named_parameters(remove_duplicate=False)]:
        if name.startswith(blocks):
            kept = name.startswith(tuple(own))
        elif name.startswith(cut.starts):
            kept = stage == 0 or (name == cut.tied and stage == stages - 1)
        else:
            kept = stage == stages - 1
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


def _gpt_block(net: Gpt, index: int, x: Tensor) -> Tensor:
    out: Tensor = net.layers[index](x, net.mask)
    return out


def _btlm_start(net: Btlm, inputs: tuple[Tensor, ...]) -> Tensor:
    out: Tensor = net.word(inputs[0]) * net.embedding_scale
    return out


def _btlm_block(net: Btlm, index: int, x: Tensor) -> Tensor:
    out: Tensor = net.layers[index](x, net.mask)
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
    Gpt: StageCut(_neo_start, _gpt_block, _neo_finish, ("word.", "position."), "word.weight"),
    Btlm: StageCut(_btlm_start, _btlm_block, _btlm_finish, ("word.",), "word.weight"),
    Vit: StageCut(_vit_start, _plain_block, _vit_finish, ("patches.", "class_token", "positions")),
}
