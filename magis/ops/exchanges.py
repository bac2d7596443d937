"""Point-to-point communication between two ranks of a group, as an operator: send, receive, or both at once.

    magis_ranks.exchange([%x, ...], size, dtype, device, peer, group) -> [size], the received tensor

An empty list sends nothing; size [0] receives nothing. The call is blocking, so that neither rank needs memory beyond
it; two ranks that send to each other do so in one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

NAME = "magis_ranks::exchange"
EXCHANGE = "magis_ranks.exchange.default"
"""Target of the operator in graphs."""
NOTHING = (0,)
"""Size that means: receive nothing."""


@torch.library.custom_op(NAME, mutates_args=())
def exchange(
    sent: Sequence[Tensor], size: Sequence[int], dtype: torch.dtype, device: torch.device, peer: int, group: str
) -> Tensor:
    """Send tensors to the rank `peer` of the group and receive one tensor of this size and dtype; wait for both."""
    found = torch.empty(tuple(size), dtype=dtype, device=device)
    ranks = _resolve_process_group(group)  # type: ignore[arg-type]
    messages = [dist.P2POp(dist.isend, tensor, group=ranks, group_peer=peer) for tensor in sent]
    if tuple(size) != NOTHING:
        messages.append(dist.P2POp(dist.irecv, found, group=ranks, group_peer=peer))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return found


@exchange.register_fake
def _fake_exchange(
    _sent: Sequence[Tensor], size: Sequence[int], dtype: torch.dtype, device: torch.device, _peer: int, _group: str
) -> Tensor:
    return torch.empty(tuple(size), dtype=dtype, device=device)
