"""What people write by hand against the memory of a loss: head and loss checkpointed in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Part = Callable[[Tensor, Tensor], Tensor]
"""Hidden states and labels of some tokens -> their part of the loss."""


def in_chunks(part: Part, x: Tensor, labels: Tensor, tokens: int) -> list[Tensor]:
    """Call a part of a loss, checkpointed, on so many tokens of each sequence at a time."""
    pairs = zip(x.split(tokens, 1), labels.split(tokens, 1), strict=True)
    return [checkpoint(part, some, their, use_reentrant=False) for some, their in pairs]


def summed_entropy(head: Callable[[Tensor], Tensor]) -> Part:
    """Return the summed cross-entropy of a head's scores, in float32."""

    def part(x: Tensor, labels: Tensor) -> Tensor:
        scores = head(x).float().flatten(0, 1)
        return F.cross_entropy(scores, labels.flatten(), reduction="sum", ignore_index=-100)

    return part
