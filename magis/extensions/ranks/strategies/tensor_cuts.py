"""Sharding of networks for tensor parallelism (Shoeybi et al. 2019), by the networks' own plans.

Attention is sharded by heads, feed-forward networks by inner width: the first projections by rows of their weights
("colwise"), the last by columns ("rowwise"), so that each needs one all-reduce in the forward and one in the backward.
Modules that no plan names are replicated: norms, and biases added after an all-reduce.

    colwise, rowwise                a linear layer; "colwise" of a parameter: its first dimension
    packed_colwise, qkv_colwise     two or three projections in one layer, each of which is sharded
    embedding_rowwise               an embedding by its vocabulary: zeros for other ranks' tokens, then one all-reduce
    colwise_gather_output           the output projection by its vocabulary (`vocabulary.py`); the output of any other
                                    layer is gathered
    replicated_output               the input of a tied output projection: replicated, its gradient all-reduced
    replicated_with_grad_allreduce  a norm per head: only a rank's own heads contribute to its gradient
    a style of torch                as `parallelize_module` applies it

`sp_plan` also shards the sequence between these layers (Korthikanti et al. 2022): where tensor parallelism replicates a
hidden state, each rank holds 1/N of its length, and rowwise layers reduce-scatter. Ranks draw equal random numbers for
dropout, on different tokens.

    sequence_parallel               a norm of sharded tokens; suffixes "_split_input", "_gather_output" as below
    split_input                     each rank takes its shard of the module's input
    gather_input, gather_output     all-gather; in the backward reduce-scatter
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from magis.capture import Workload
from magis.errors import UsageError
from magis.extensions.ranks.strategies.distributed import quiet
from magis.extensions.ranks.strategies.model_plans import plan_of
from magis.extensions.ranks.strategies.uneven_heads import draw_alike, head_shares, share_columns, share_rows
from magis.extensions.ranks.strategies.vocabulary import LossOfParts

PART, WHOLE = Shard(1), Replicate()
"""Placements of a hidden state [batch, length, width]: sharded along its length, or replicated."""

_PACKED = {"colwise": 1, "packed_colwise": 2, "qkv_colwise": 3}
"""Styles of column-parallel layers -> number of projections in one layer."""
_GATHERED = ("colwise_gather_output", "colwise_rep")
_VOCABULARY = ("embedding_rowwise", "replicated_output")
_NOTHING = ("replicate", "replicated", "rep")
_STYLES = (*_PACKED, "rowwise", *_GATHERED, *_VOCABULARY, "replicated_with_grad_allreduce", *_NOTHING)
_SEQUENCE = (
    "sequence_parallel",
    "sequence_parallel_split_input",
    "sequence_parallel_gather_output",
    "split_input",
    "gather_input",
    "gather_output",
)


def share_network(work: Workload, group: DeviceMesh, *, vocabulary: bool = True, sequence: bool = False) -> Workload:
    """Shard the network of ``work`` over the ranks of a group, with vocabulary and ``sequence`` if asked for.

    The loss then takes sharded logits. Raises UsageError if the network has no plan, or an unsupported one.
    """
    net, kind = work.module, type(work.module).__name__
    plan = plan_of(net, "tp_plan")
    along = plan_of(net, "sp_plan") if sequence else {}
    torch_styles = [style for style in plan.values() if isinstance(style, ParallelStyle)]
    if sequence:
        _check_sequence(work, group, known=bool(along) or any(isinstance(s, SequenceParallel) for s in torch_styles))
    named = dict(net.named_parameters(remove_duplicate=False))
    ties = _ties(named)
    # the layers of a module are sharded together, those of an attention by heads
    layers: dict[str, dict[str, str]] = {}
    in_parts = bool(torch_styles)  # the loss accepts outputs that they leave sharded
    for path, style in plan.items():
        if isinstance(style, ParallelStyle):
            with quiet():
                parallelize_module(net.get_submodule(path), group, style)
            continue
        if style not in _STYLES:
            raise UsageError(
                f"{work.name}: the plan of {kind} cuts {path} by {style!r}, which tp does not know",
                hint=f"it knows {', '.join(_STYLES)} and styles of torch; use ddp, fsdp or zero for other networks",
            )
        words = style in _VOCABULARY or path in named or (style in _GATHERED and _is_of_vocabulary(net, path))
        if style in _NOTHING or (words and not vocabulary and not sequence):
            continue
        if words:
            in_parts = _share_words(work, group, path, style) or in_parts
        elif _is_there(net.get_submodule(path)):
            layers.setdefault(path.rpartition(".")[0], {})[path] = style
    for parent, styles in layers.items():
        _share_layers(work, group, parent, styles, sequence=sequence)
    if not layers and not torch_styles:
        raise UsageError(
            f"{work.name}: tensor parallelism finds no attention to share in {kind}, which has no plan",
            hint="give it a tp_plan, as Hugging Face's configurations have it; or use ddp, fsdp or zero",
        )
    for path, style in along.items():
        _share_sequence(work, group, path, style)
    _tie_again(net, ties)
    for parameter in net.parameters():
        if parameter.requires_grad and isinstance(parameter.data, DTensor):
            parameter.register_hook(partial(_redistribute_gradient, tuple(parameter.data.placements)))
    return replace(work, loss_fn=LossOfParts(work.loss_fn)) if in_parts else work


def _check_sequence(work: Workload, group: DeviceMesh, *, known: bool) -> None:
    """Raise UsageError for a network without a plan for its sequence, and for a length that does not divide evenly."""
    if not known:
        kind = type(work.module).__name__
        raise UsageError(
            f"{work.name}: sequence parallelism does not know where the sequence of a {kind} is cut",
            hint="give it an sp_plan beside its tp_plan, or use tp without sp",
        )
    length = work.inputs[0].shape[1]
    if length % group.size():
        raise UsageError(
            f"{work.name}: a sequence of {length} tokens cannot be shared out evenly to {group.size()} ranks",
            hint="use a number of ranks that divides it, or tp without sp",
        )


def _is_there(layer: nn.Module) -> bool:
    """Return True if this rank's stage holds the layer."""
    return getattr(layer, "weight", None) is not None


def _is_of_vocabulary(net: nn.Module, path: str) -> bool:
    """Return True if a layer's output size equals the vocabulary of an embedding."""
    words = {part.num_embeddings for part in net.modules() if isinstance(part, nn.Embedding)}
    return getattr(net.get_submodule(path), "out_features", None) in words


def _share_words(work: Workload, group: DeviceMesh, path: str, style: str) -> bool:
    """Shard a layer or parameter along the vocabulary, and return True if the logits are then sharded."""
    net, ranks = work.module, group.size()
    owner, _, leaf = path.rpartition(".")
    parent = net.get_submodule(owner)
    with quiet():
        if leaf in parent._parameters:
            whole: Any = parent._parameters[leaf]
            if whole is not None:
                part = nn.Parameter(distribute_tensor(whole.detach(), group, [Shard(0)]), whole.requires_grad)
                parent.register_parameter(leaf, part)
            return False
        module: Any = net.get_submodule(path)
        if style == "replicated_output":
            whole_output = PrepareModuleOutput(
                output_layouts=WHOLE, desired_output_layouts=WHOLE, use_local_output=False
            )
            parallelize_module(module, group, whole_output)
            return True
        if not _is_there(module):
            return False
        words = len(module.weight)
        if -(-words // ranks) * (ranks - 1) >= words:
            raise UsageError(
                f"{work.name}: a vocabulary of {words} leaves one of {ranks} ranks without a part of it",
                hint="share it out to fewer ranks",
            )
        if style == "embedding_rowwise":
            parallelize_module(module, group, RowwiseParallel(input_layouts=Replicate()))
            return False
        parallelize_module(module, group, ColwiseParallel(use_local_output=False))
        return True


def _share_layers(work: Workload, group: DeviceMesh, parent: str, styles: dict[str, str], *, sequence: bool) -> None:
    """Shard the layers of one module, by heads if the module has a head width. Raises UsageError for too few heads."""
    net, ranks, what = work.module, group.size(), f"{work.name}: {parent}"
    module: Any = net.get_submodule(parent)
    last = RowwiseParallel(output_layouts=PART if sequence else WHOLE)
    layers: dict[str, Any] = {path: net.get_submodule(path) for path in styles}
    norms = [path for path, style in styles.items() if style == "replicated_with_grad_allreduce"]
    for path, layer in layers.items():
        if path not in norms and not isinstance(layer, nn.Linear):
            raise UsageError(f"{what} has a {type(layer).__name__} where tp expects a linear layer")
    columns = _cut_heads(work, group, parent, {path: style for path, style in styles.items() if style in _PACKED})
    if columns is None and norms:
        raise UsageError(f"{what}: tp cuts {norms[0]} by heads, and {type(module).__name__} does not say how many")
    name = group.get_group().group_name
    for path, style in styles.items():
        layer, packed = layers[path], _PACKED.get(style, 1)
        if path in norms:  # [batch, length, heads, width]
            _parallelize(layer, group, SequenceParallel(sequence_dim=2, use_local_output=True))
            continue
        if columns and style == "rowwise":
            share_columns(layer, columns, group.get_local_rank(), name)
            if sequence:
                layer.register_forward_hook(partial(_redistribute_output, group, WHOLE, PART))
            continue
        if columns:
            share_rows(layer, columns, group.get_local_rank(), name, packed=packed)
            continue
        wide = layer.in_features if style == "rowwise" else layer.out_features
        if wide % (ranks * packed):
            raise UsageError(
                f"{work.name}: the inner width of {parent}, {wide}, cannot be shared out evenly to {ranks} ranks",
                hint="use a divisor of it",
            )
        if packed > 1:
            _group_rows(layer, ranks, packed)
        gathered = ColwiseParallel(output_layouts=Replicate()) if style in _GATHERED else ColwiseParallel()
        _parallelize(layer, group, last if style == "rowwise" else gathered)
    if columns:
        draw_alike(module)


def _cut_heads(work: Workload, group: DeviceMesh, parent: str, styles: dict[str, str]) -> list[int] | None:
    """Assign the heads of an attention to ranks, and register the cut of its masks.

    Returns the width of each rank's heads if the widths differ, [] if not; None for a module without heads. Raises
    UsageError if there are fewer heads than ranks.
    """
    net, ranks, what = work.module, group.size(), f"{work.name}: {parent}"
    module: Any = net.get_submodule(parent)
    width = getattr(module, "head_width", None) or getattr(module, "head_dim", None)
    layers: dict[str, Any] = {path: net.get_submodule(path) for path in styles}
    wide = {path: _PACKED[style] * (width or 1) for path, style in styles.items()}  # rows for each head
    if not width or not styles or any(layers[path].out_features % each for path, each in wide.items()):
        return None
    heads = [layers[path].out_features // each for path, each in wide.items()]
    fewest, most = min(heads), max(heads)
    if fewest < ranks:
        raise UsageError(f"{what}: {fewest} heads are too few for {ranks} ranks", hint="share them out to fewer ranks")
    uneven = most % ranks or fewest % ranks
    if uneven and fewest != most:
        raise UsageError(
            f"{what}: {most} heads, {fewest} of keys and values, cannot be shared out evenly to {ranks} ranks",
            hint="use a divisor of both",
        )
    _cut_masks(module, most, group)
    return [width * share for share in head_shares(most, ranks)] if uneven else []


def _cut_masks(attention: nn.Module, heads: int, group: DeviceMesh) -> None:
    """Register a pre-hook that cuts a per-head attention mask (ALiBi's) to this rank's heads."""
    rank, shares = group.get_local_rank(), head_shares(heads, group.size())
    low, high = sum(shares[:rank]), sum(shares[: rank + 1])

    def own_mask(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def own(mask: Any) -> Any:
            by_heads = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == heads
            return mask[:, low:high] if by_heads else mask

        return (*args[:1], *map(own, args[1:])), {name: own(each) for name, each in kwargs.items()}

    attention.register_forward_pre_hook(own_mask, with_kwargs=True)


def _group_rows(layer: nn.Module, ranks: int, packed: int) -> None:
    """Reorder the rows of a packed projection by rank: query, key and value of the first rank's heads, ..."""
    with torch.no_grad():
        for parameter in layer.parameters(recurse=False):
            rows = parameter.unflatten(0, (packed, ranks, -1)).transpose(0, 1).flatten(0, 2)
            parameter.copy_(rows.clone())


def _parallelize(module: nn.Module, group: DeviceMesh, style: ParallelStyle) -> None:
    with quiet():
        parallelize_module(module, group, style)


def _ties(named: dict[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of each tied parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie_again(net: nn.Module, ties: list[list[str]]) -> None:
    """Tie parameters again after sharding; a still unsharded one becomes the sharded one."""
    for names in ties:
        places = [(net.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        own: list[Any] = [module._parameters[leaf] for module, leaf in places]
        cut = next((each for each in own if each is not None and isinstance(each.data, DTensor)), None)
        for (module, leaf), each in zip(places, own, strict=True):
            if cut is None or each is None or each is cut:
                continue
            if not isinstance(each.data, DTensor) and isinstance(module, nn.Embedding):
                _parallelize(module, cut.data.device_mesh, RowwiseParallel(input_layouts=Replicate()))
            module._parameters[leaf] = cut


def _redistribute_gradient(placements: tuple[Placement, ...], grad: Tensor) -> Tensor:
    """Redistribute a gradient to the placements of its weight."""
    if isinstance(grad, DTensor) and grad.placements != placements:
        return grad.redistribute(placements=placements)
    return grad


def _share_sequence(work: Workload, group: DeviceMesh, path: str, style: str) -> None:
    """Register hooks on a module that shard, gather or keep sharded its sequence, as the style says."""
    module = work.module.get_submodule(path)
    if style not in _SEQUENCE:
        raise UsageError(f"{work.name}: the sp_plan cuts {path} by {style!r}", hint=f"it knows {', '.join(_SEQUENCE)}")
    if style.startswith("sequence_parallel"):
        _parallelize(module, group, SequenceParallel(use_local_output=True))
    if style.endswith("split_input"):
        module.register_forward_pre_hook(partial(_redistribute_input, group, WHOLE, PART, local=True), prepend=True)
    elif style == "gather_input":
        module.register_forward_pre_hook(partial(_redistribute_input, group, PART, WHOLE, local=False))
    elif style == "gather_output":
        module.register_forward_hook(partial(_redistribute_output, group, PART, WHOLE))
    elif style.endswith("gather_output"):
        gathered = PrepareModuleOutput(output_layouts=PART, desired_output_layouts=WHOLE, use_local_output=False)
        _parallelize(module, group, gathered)


def _redistribute(group: DeviceMesh, start: Placement, end: Placement, x: Tensor, *, local: bool = True) -> Tensor:
    with quiet():
        found = DTensor.from_local(x, group, [start], run_check=False).redistribute(placements=[end])
        made: Tensor = found.to_local() if local else found
        return made


def _redistribute_input(
    group: DeviceMesh, start: Placement, end: Placement, _module: nn.Module, args: Any, *, local: bool
) -> tuple[Any, ...]:
    return _redistribute(group, start, end, args[0], local=local), *args[1:]


def _redistribute_output(
    group: DeviceMesh, start: Placement, end: Placement, _module: nn.Module, _args: Any, out: Tensor
) -> Tensor:
    return _redistribute(group, start, end, out)
