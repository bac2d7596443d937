"""Swaps of tensors that autograd saves: copies to host memory in the forward, copies back in the backward.

A plan's `magis.store`, `magis.wait` and `magis.load` run on the host memory and the copy streams of
`magis.runtime.swap_streams`, as in steps of `magis.optimize`. Autograd saves tensors only, so a host copy passes from
forward to backward as a tensor of bytes over the host buffer, outside of torch's allocator. Its address tells which
copy it is: the backward finds the layout and the event of the copy there. The buffer is free again when autograd drops
that tensor.

Torch's own operators for this (`torch.ops.ao.offload`, `reload`, `wait_tensor`) are not used: they need an accelerator,
share one stream for both directions, where plans count on two, allocate pinned memory anew for each copy unless the
whole loop runs in a context of theirs, and free the host copy at the first load, so that a second backward reads
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from magis.errors import UsageError
from magis.runtime.swap_streams import AnyHost, Stored, make_host


def over_host(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor over host memory that autograd can save; modes that count the tensors of a step do not see it."""
    with _disable_current_modes():
        return torch.from_numpy(array)


class SavedOnHost:
    """Host copies of the tensors that one compiled graph swaps, for any number of its steps at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._stored: dict[int, Stored] = {}
        """Copies that a tensor holds, by the address of their bytes."""

    def __deepcopy__(self, memo: object) -> SavedOnHost:
        """Return itself: AOTAutograd copies the backward, which must find what the forward stored."""
        return self

    @cached_property
    def _host(self) -> AnyHost:
        return make_host(self._device)

    @property
    def operators(self) -> Mapping[str, Callable[..., Any]]:
        """Functions of a plan's operators, by target."""
        return {"magis.store": self.store, "magis.wait": self.wait, "magis.load": self.load}

    def join(self) -> None:
        """Wait for every copy of an earlier step: one that raised may have left some under way."""
        self._host.join()

    def store(self, tensor: Tensor) -> Tensor:
        """Start the copy of a tensor to the host; return the bytes of the copy."""
        stored = self._host.store(tensor)
        buffer = stored.data.numpy() if isinstance(stored.data, Tensor) else stored.data
        held: np.ndarray[Any, Any] = buffer[:]  # an object of its own, which lives as long as the tensor over it
        saved = over_host(held)
        self._stored[saved.data_ptr()] = stored
        weakref.finalize(held, self._stored.pop, saved.data_ptr()).atexit = False
        return saved

    def wait(self, tensor: Tensor, saved: Tensor) -> None:
        """Make the device wait for the copy to the host; the caller may then drop the tensor."""
        self._host.wait(tensor, self._found(saved))

    def load(self, saved: Tensor) -> Tensor:
        """Start the copy from the host to a new tensor with the layout of the stored one."""
        return self._host.load(self._found(saved))

    def ready(self, tensor: Tensor) -> None:
        """Make the device wait for the copy to a loaded tensor."""
        self._host.ready(tensor)

    def _found(self, saved: Tensor) -> Stored:
        found = self._stored.get(saved.data_ptr())
        if found is None:
            raise UsageError("a hook replaced a saved tensor that is in host memory", hint='pass options={"link": 0}')
        return found
