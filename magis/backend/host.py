"""Host memory for swapped tensors, outside of torch's allocator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """A tensor in host memory: its bytes and its layout."""

    data: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class HostBuffers:
    """Copies of tensors in plain numpy memory, with the tensors' layout kept.

    Swapping frees nothing on a CPU, where host and device are one; it runs there all the same, so that swapping plans
    can be executed and checked without a GPU.
    """

    def store(self, tensor: Tensor) -> Stored:
        """Copy the bytes that ``tensor`` covers."""
        span = tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset())
        return Stored(
            span.view(torch.uint8).numpy().copy(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
        )

    def wait(self, tensor: Tensor, stored: Stored) -> None:
        """Nothing to wait for: the copy is made when it is asked for."""

    def load(self, stored: Stored) -> Tensor:
        """A fresh tensor with the stored layout and contents."""
        tensor = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype)
        tensor.as_strided((_span(tensor),), (1,)).view(torch.uint8).numpy()[:] = stored.data
        return tensor


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last one that the tensor covers."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
