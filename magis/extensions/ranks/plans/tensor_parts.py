"""Parameters under tensor parallelism: the rank holds a plain local part, and modules use a DTensor around it.

    held by the rank      part [n / ranks, k], trained by the step's own update
    used by the modules   DTensor [n, k] around that part, from which torch derives operators and collectives

So a capture sees operators on local parts and torch's collectives, and the step's weights are this rank's own.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from magis.extensions.ranks.plans.sharded_weights import Wrappers
from magis.extensions.ranks.strategies.distributed import quiet


def hold_parts(module: nn.Module) -> Wrappers:
    """Replace the modules' DTensor parameters by this rank's local parts, under the same names.

    Returns, for each part, the function that wraps it as a DTensor again.
    """
    parts: dict[nn.Parameter, nn.Parameter] = {}
    wrappers: Wrappers = {}
    for holder in module.modules():
        for name, whole in list(holder._parameters.items()):
            if whole is None or not isinstance(whole.data, DTensor):
                continue
            if whole not in parts:
                own = whole.data.to_local().detach()
                if not own.is_contiguous() or own.untyped_storage().nbytes() != own.nbytes:
                    own = own.clone()  # with its own storage
                part = nn.Parameter(own, whole.requires_grad)
                parts[whole] = part
                wrappers[part] = partial(_distributed, whole.data._spec)
            holder._parameters[name] = parts[whole]
    return wrappers


def _distributed(spec: DTensorSpec, part: Tensor) -> Tensor:
    """Return the DTensor whose local part on this rank is ``part``."""
    with quiet():
        return DTensor.from_local(
            part, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
