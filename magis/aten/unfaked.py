"""Results of operators that torch's functions for fake tensors do not know, since their sizes hang on numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["known_results", "unfaked"]

Read = Callable[[Tensor], object]
"""Notes that a tensor's numbers are read; raises where they are not known."""


def unfaked(func: Any, args: Sequence[Any], read: Read) -> tuple[Tensor, ...] | None:
    """What `func` returns for `args`, on whatever kind of tensors is in force; None for other operators."""
    match str(func):
        case "aten._ctc_loss.default" | "aten._ctc_loss.Tensor":
            scores, lengths = args[0], _numbers(args[3], read)
            steps, batch = scores.shape[0], scores.shape[1]
            states = (batch, steps, 2 * max(lengths, default=0) + 1)
            return torch.empty(batch, dtype=scores.dtype), torch.empty(states, dtype=scores.dtype)
        case "aten._ctc_loss_backward.default" | "aten._ctc_loss_backward.Tensor":
            return (torch.empty(args[1].shape, dtype=args[1].dtype),)
        case _:
            return None


def known_results(func: Any, args: Sequence[Any], made: Any, read: Read) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of the results `made` that hang on known numbers alone, where others do not; and what they are.

    Recurrent layers read the sizes of packed batches straight from memory.
    """
    if str(func) == "aten._pack_padded_sequence.default":
        padded, lengths, batch_first = args
        read(lengths)
        with _disable_current_modes():
            rows = torch.zeros((*padded.shape[:2], 1))
            yield made[1], torch._VF._pack_padded_sequence(rows, lengths, batch_first)[1]


def _numbers(lengths: Any, read: Read) -> Sequence[int]:
    if not isinstance(lengths, Tensor):
        return lengths  # type: ignore[no-any-return]
    read(lengths)
    with _disable_current_modes():
        return lengths.tolist()
