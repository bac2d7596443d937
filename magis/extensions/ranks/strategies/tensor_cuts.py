"""Sequence parallelism beside tensor parallelism: norms and dropouts between shared layers have a part of the sequence.

Where tensor parallelism has the same hidden state on every rank, each rank has 1/N of its length (Korthikanti et al.
2022). By torch's styles, as torchtitan does it:

    embeddings                      whole, of which each rank takes its part
    norms                           `SequenceParallel`
    in front of a block's half      parts gathered; in the backward sums, of which each rank gets its part
    behind it                       `RowwiseParallel` to parts: sums, of which each rank gets its part
    in front of the projection      parts gathered

The numbers that ranks draw for dropout are the same, on other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleOutput, SequenceParallel, parallelize_module

from magis.capture import Workload
from magis.errors import UsageError
from magis.extensions.models.building import FeedForward, SelfAttention
from magis.extensions.models.decoders import Btlm, BtlmLayer, Gpt, GptNeo
from magis.extensions.models.encoders import Bert
from magis.extensions.ranks.strategies.distributed import quiet

PART, WHOLE = Shard(1), Replicate()
"""Placements of the length of a hidden state [batch, length, width]."""

_ENTRANCES: dict[type[nn.Module], Callable[[Workload], str]] = {
    Bert: lambda _: "embeddings.norm",
    Gpt: lambda _: "dropout",
    GptNeo: lambda _: "dropout",
    Btlm: lambda work: work.blocks[0],
}
"""Network -> path of the first module that gets parts."""


def share_sequence(work: Workload, group: DeviceMesh) -> None:
    """Have the ranks of a group work on parts of the sequence between the shared layers of ``work``.

    Raises UsageError for a network without known cuts, and for a length that the ranks do not divide.
    """
    net, ranks = work.module, group.size()
    entrance = _ENTRANCES.get(type(net))
    if entrance is None:
        raise UsageError(
            f"{work.name}: sequence parallelism does not know where the sequence of a {type(net).__name__} is cut",
            hint="tp+sp knows bert, gpt, gpt_neo and btlm; use tp without sp for other networks",
        )
    length = work.inputs[0].shape[1]
    if length % ranks:
        raise UsageError(
            f"{work.name}: a sequence of {length} tokens cannot be shared out evenly to {ranks} ranks",
            hint="use a number of ranks that divides it, or tp without sp",
        )
    norms: dict[str, ParallelStyle] = {
        path: SequenceParallel(use_local_output=True)
        for path, part in net.named_modules()
        if isinstance(part, nn.LayerNorm) and path != "transform_norm"
    }
    with quiet():
        parallelize_module(net, group, norms)
    entered = partial(_redistribute_input, group, WHOLE, PART, local=True)
    net.get_submodule(entrance(work)).register_forward_pre_hook(entered, prepend=True)
    for part in net.modules():
        if isinstance(part, (SelfAttention, FeedForward)):
            plain = isinstance(part, SelfAttention) and has_uneven_heads(part)
            part.register_forward_pre_hook(partial(_redistribute_input, group, PART, WHOLE, local=plain))
            if plain:
                part.register_forward_hook(partial(_redistribute_output, group, WHOLE, PART))
        elif isinstance(part, BtlmLayer):
            parallelize_module(part, group, {"norm": gathered_output()})
    if isinstance(net, Bert):  # its output heads read single tokens
        net.get_submodule(work.blocks[-1]).register_forward_hook(partial(_redistribute_output, group, PART, WHOLE))


def has_uneven_heads(attention: SelfAttention) -> bool:
    """Return True if a shared attention holds plain parts: ranks do not divide its heads."""
    return not isinstance(attention.out.weight.data, DTensor)


def gathered_output() -> PrepareModuleOutput:
    """Return the style that gathers a module's output, in parts, on every rank."""
    return PrepareModuleOutput(output_layouts=PART, desired_output_layouts=WHOLE, use_local_output=False)


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
