"""What a step keeps on the host: swapped tensors and states of the generator, outside of torch's allocator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, default_generator
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class Stored:
    """A tensor in host memory: its bytes and its layout."""

    data: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Host:
    """Copies of tensors in plain numpy memory, with the tensors' layout kept; the device's generator.

    Swapping frees nothing on a CPU, where host and device are one; it runs there all the same, so that swapping plans
    can be executed and checked without a GPU.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        on_gpu = torch.device(device).type == "cuda"
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()] if on_gpu else default_generator

    def rng_save(self) -> npt.NDArray[np.uint8]:
        """The generator's state."""
        with _disable_current_modes():  # torch hands states out as tensors; those are none of the step's
            return self._generator.get_state().numpy().copy()

    def rng_enter(self, state: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Put an earlier state back; returns the present one."""
        present = self.rng_save()
        self.rng_leave(state)
        return present

    def rng_leave(self, state: npt.NDArray[np.uint8]) -> None:
        """Put back the state in which ``rng_enter`` found the generator."""
        with _disable_current_modes():
            self._generator.set_state(torch.from_numpy(state))

    def store(self, tensor: Tensor) -> Stored:
        """Copy the bytes that ``tensor`` covers."""
        span = tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset())
        return Stored(span.view(torch.uint8).numpy().copy(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

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
