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
"""Of the length of a hidden state [batch, length, width]."""

_ENTRANCES: dict[type[nn.Module], Callable[[Workload], str]] = {
    Bert: lambda _: "embeddings.norm",
    Gpt: lambda _: "dropout",
    GptNeo: lambda _: "dropout",
    Btlm: lambda work: work.blocks[0],
}
"""Paths of the first modules that get parts."""


def share_sequence(work: Workload, group: DeviceMesh) -> None:
    """Have the ranks of a group work on parts of the sequence between the shared layers of ``work``. UsageError for a
    network or a length that it is not for."""
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
    norms: dict[str, ParallelStyle] = {}
    norms |= {path: SequenceParallel(use_local_output=True) for path in _norms(net)}
    with quiet():
        parallelize_module(net, group, norms)
    entered = partial(_given, group, WHOLE, PART, local=True)
    net.get_submodule(entrance(work)).register_forward_pre_hook(entered, prepend=True)
    for part in net.modules():
        if isinstance(part, (SelfAttention, FeedForward)):
            plain = isinstance(part, SelfAttention) and has_uneven_heads(part)
            part.register_forward_pre_hook(partial(_given, group, PART, WHOLE, local=plain))
            if plain:
                part.register_forward_hook(partial(_made, group, WHOLE, PART))
        elif isinstance(part, BtlmLayer):
            parallelize_module(part, group, {"norm": gathered_output()})
    if isinstance(net, Bert):  # whose heads look at single tokens
        net.get_submodule(work.blocks[-1]).register_forward_hook(partial(_made, group, PART, WHOLE))


def has_uneven_heads(attention: SelfAttention) -> bool:
    """Whether an attention that is shared holds plain parts."""
    return not isinstance(attention.out.weight.data, DTensor)


def gathered_output() -> PrepareModuleOutput:
    """The output of a module that makes parts, whole on every rank."""
    return PrepareModuleOutput(output_layouts=PART, desired_output_layouts=WHOLE, use_local_output=False)


def _norms(net: nn.Module) -> list[str]:
    """Paths of norms that see parts."""
    return [path for path, part in net.named_modules() if isinstance(part, nn.LayerNorm) and path != "transform_norm"]


def _moved(group: DeviceMesh, start: Placement, end: Placement, x: Tensor, *, local: bool = True) -> Tensor:
    with quiet():
        found = DTensor.from_local(x, group, [start], run_check=False).redistribute(placements=[end])
        made: Tensor = found.to_local() if local else found
        return made


def _given(
    group: DeviceMesh, start: Placement, end: Placement, _module: nn.Module, args: Any, *, local: bool
) -> tuple[Any, ...]:
    return _moved(group, start, end, args[0], local=local), *args[1:]


def _made(group: DeviceMesh, start: Placement, end: Placement, _module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    return _moved(group, start, end, out)
