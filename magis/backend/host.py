"""What a step keeps on the host: swapped tensors and states of the generator, outside of torch's allocator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from magis.aten.states import generator_of


@dataclass(frozen=True)
class Stored:
    """A tensor in host memory: its bytes and its layout."""

    data: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class GeneratorStates:
    """States of a device's default generator, or of a step's own: bytes in host memory, a GPU's as well."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._generator = generator_of(device)

    def rng_save(self, own: torch.Generator | None = None) -> npt.NDArray[np.uint8]:
        """The generator's state."""
        with _disable_current_modes():  # torch hands states out as tensors; those are none of the step's
            return (own or self._generator).get_state().numpy().copy()

    def rng_enter(self, state: npt.NDArray[np.uint8], own: torch.Generator | None = None) -> npt.NDArray[np.uint8]:
        """Put an earlier state back; returns the present one."""
        present = self.rng_save(own)
        self.rng_leave(state, own)
        return present

    def rng_leave(self, state: npt.NDArray[np.uint8], own: torch.Generator | None = None) -> None:
        """Put back the state in which ``rng_enter`` found the generator."""
        with _disable_current_modes():
            (own or self._generator).set_state(torch.from_numpy(state))


class Host(GeneratorStates):
    """Copies of tensors in plain numpy memory, with the tensors' layout kept; the device's generator.

    Swapping frees nothing on a CPU, where host and device are one; it runs there all the same, so that swapping plans
    can be executed and checked without a GPU. Every copy is made when it is asked for: there is nothing to wait for.
    """

    def store(self, tensor: Tensor) -> Stored:
        """Copy the bytes that ``tensor`` covers."""
        return Stored(as_bytes(tensor).numpy().copy(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def wait(self, tensor: Tensor, stored: Stored) -> None:
        """The copy to the host is done from here on."""

    def load(self, stored: Stored) -> Tensor:
        """A fresh tensor with the stored layout and contents."""
        tensor = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype)
        as_bytes(tensor).numpy()[:] = stored.data
        return tensor

    def ready(self, tensor: Tensor) -> None:
        """What was loaded may be used from here on."""

    def join(self) -> None:
        """Every copy is done from here on."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes from the first to the last element that the tensor covers, gaps included; a view."""
    return tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset()).view(torch.uint8)


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last one that the tensor covers."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
