"""Blocks shared by tensor parallelism, held as plain parameters: each rank has its part, modules meet distributed ones.

    held by the rank     part [n / ranks, k], trained by the step's own update
    met by the modules   DTensor [n, k] around that very part, from which torch takes its operators and messages

So a step is captured with the operators on the parts and with torch's messages, and its weights are this rank's own.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from magis.extensions.ranks.plans.sharded_weights import Looks
from magis.extensions.ranks.strategies.distributed import quiet


def hold_parts(module: nn.Module) -> Looks:
    """Have the modules hold this rank's parts of their distributed parameters, under the same names; returns how each
    becomes a distributed tensor again."""
    parts: dict[nn.Parameter, nn.Parameter] = {}
    looks: Looks = {}
    for holder in module.modules():
        for name, whole in list(holder._parameters.items()):
            if whole is None or not isinstance(whole.data, DTensor):
                continue
            if whole not in parts:
                part = nn.Parameter(_own(whole.data), whole.requires_grad)
                parts[whole] = part
                looks[part] = partial(_around, whole.data._spec)
            holder._parameters[name] = parts[whole]
    return looks


def _own(whole: DTensor) -> Tensor:
    """This rank's part, in memory of its own."""
    part = whole.to_local().detach()
    alone = part.is_contiguous() and part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if alone else part.clone()


def _around(spec: DTensorSpec, part: Tensor) -> Tensor:
    """The distributed tensor of which this rank has that part."""
    with quiet():
        return DTensor.from_local(
            part, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
