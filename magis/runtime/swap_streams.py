"""Swaps: host memory for tensors that leave the device, and copies on streams of their own on a GPU.

There are two *copy streams*, one for each direction; the operators run on the *compute stream* (whichever is current).
A stream runs what it is given in order; what is ordered between two is ordered by events, and nothing here ever stops
the host.

    store   the stream of stores waits for all that the compute stream was given so far, copies to pinned memory, is
            done
    wait    the compute stream waits until that is done
    load    memory from the compute stream; the stream of loads waits for all that the compute stream was given so far,
            copies to that memory, and it is ready
    ready   the compute stream waits until that is so; the generated code asks for it before the first operator that
            takes the loaded tensor or a view of it, and before the tensor is forgotten where there is none

Two streams, since a GPU has a copy engine for each direction, and PCIe and NVLink carry both directions at once, from
and to pinned memory. On one stream a load would wait for every store that was given before it, which nothing needs. The
evaluator counts the same: each direction is a queue of its own, in this order, with a fixed time for each copy besides
that of its bytes (`magis.simulate.kernel`).

Why that is enough, without ``Tensor.record_stream``:

* The allocator gives freed memory away again on the compute stream, in the order of that stream. A stored tensor is
  forgotten after its ``wait`` (``verify`` refuses a store without one, and a write in between), so whatever gets its
  memory next comes after the copy.
* Memory for a load may have been in use by operators that were given to the compute stream before but have not run:
  hence the wait of the stream of loads. It orders a load behind the store of the same tensor, too: ``wait`` stands
  between them (``verify`` refuses a load of what nothing has waited for).
* Pinned buffers are made once and used again from step to step. A buffer is free once nothing holds it: no name of the
  step, and no load that nobody has asked for yet, since a load holds its buffer until ``ready``. By then the compute
  stream waits for that load. The next store into the buffer waits for all that the compute stream was given, so it
  comes after the load; and it need not wait for anything that the plan does not know of.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from magis.cost.shapes import reach
from magis.ops.generators import generator_of

# What a step keeps on the host: swapped tensors and states of the generator, outside of torch's allocator.


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in host memory: its bytes, its layout, and the event of a stream after which they are there."""

    data: Any
    """An array of numpy's, with streams pinned memory."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    arrived: Any = None

    @classmethod
    def of(cls, tensor: Tensor, data: object, arrived: object = None) -> Stored:
        return cls(data, tensor.dtype, tuple(tensor.shape), tensor.stride(), arrived)

    def empty(self, device: torch.device | str) -> Tensor:
        """Return a fresh tensor with the stored layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class GeneratorStates:
    """States of a device's default generator, or of a step's own: bytes in host memory, a GPU's as well."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._generator = generator_of(device)

    def rng_save(self, own: torch.Generator | None = None) -> npt.NDArray[np.uint8]:
        """Return the generator's state."""
        with _disable_current_modes():  # torch hands states out as tensors; those are none of the step's
            return (own or self._generator).get_state().numpy().copy()

    def rng_enter(self, state: npt.NDArray[np.uint8], own: torch.Generator | None = None) -> npt.NDArray[np.uint8]:
        """Put an earlier state back; return the present one."""
        present = self.rng_save(own)
        self.rng_leave(state, own)
        return present

    def rng_leave(self, state: npt.NDArray[np.uint8], own: torch.Generator | None = None) -> None:
        """Put back the state in which ``rng_enter`` found the generator."""
        with _disable_current_modes():
            (own or self._generator).set_state(torch.from_numpy(state))


class HostMemory(GeneratorStates):
    """Copies of tensors in plain numpy memory, with the tensors' layout kept; the device's generator.

    Swapping frees nothing on a CPU, where host and device are one; it runs there all the same, so that swapping plans
    can be executed and checked without a GPU. Every copy is made when it is asked for: there is nothing to wait for.
    """

    def store(self, tensor: Tensor) -> Stored:
        """Copy the bytes that ``tensor`` covers."""
        return Stored.of(tensor, as_bytes(tensor).numpy().copy())

    def wait(self, tensor: Tensor, stored: Stored) -> None:
        """Return at once: the copy to the host is done."""

    def load(self, stored: Stored) -> Tensor:
        """Return a fresh tensor with the stored layout and contents."""
        tensor = stored.empty("cpu")
        as_bytes(tensor).numpy()[:] = stored.data
        return tensor

    def ready(self, tensor: Tensor) -> None:
        """Return at once: what was loaded may be used."""

    def join(self) -> None:
        """Return at once: every copy is done."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes from the first to the last element that the tensor covers, gaps included; a view."""
    return tensor.as_strided((reach(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset()).view(torch.uint8)


class Stream(Protocol):
    """A queue of the device: ``torch.cuda.Stream``."""

    def record_event(self) -> Any:
        """Return an event that occurs when all that the stream was given so far has run."""

    def wait_event(self, event: Any) -> None:
        """Let whatever the stream is given from now on run after the event."""


class Runtime(Protocol):
    """Streams and pinned memory of a device, as swapping uses them."""

    def current_stream(self) -> Any:
        """Return the stream that operators go to."""

    def new_stream(self) -> Any:
        """Make a further stream."""

    def running_on(self, stream: Any) -> AbstractContextManager[object]:
        """Send the operators in the block to that stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate host memory that the device copies from and to by itself."""


class CudaRuntime:
    """A GPU by way of ``torch.cuda``."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def running_on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class StreamHost(GeneratorStates):
    """The interface of ``HostMemory`` for a device with streams; see the module's text for what waits for what."""

    def __init__(self, device: torch.device | str, runtime: Runtime) -> None:
        super().__init__(device)
        self._device = torch.device(device)
        self._runtime = runtime
        self._stores: Stream = runtime.new_stream()
        self._loads: Stream = runtime.new_stream()
        self._free: dict[int, list[Tensor]] = {}
        self._arriving: dict[int, tuple[Any, Stored]] = {}
        """Event of its copy and source of each loaded tensor, by the tensor's identity."""
        self._last: dict[Stream, Any] = {}
        """Last event of each copy stream that the compute stream has not waited for."""

    def store(self, tensor: Tensor) -> Stored:
        """Start to copy the bytes that ``tensor`` covers to the host."""
        source = as_bytes(tensor)
        buffer = self._pinned_buffer(source.numel())
        stored = Stored.of(tensor, buffer, self._copy(self._stores, buffer, source))
        weakref.finalize(stored, self._free[source.numel()].append, buffer).atexit = False
        return stored

    def wait(self, tensor: Tensor, stored: Stored) -> None:  # noqa: ARG002  (taken to keep it alive until here)
        """Let the compute stream wait until the copy to the host is done."""
        self._wait_for(stored.arrived)

    def load(self, stored: Stored) -> Tensor:
        """Start to fill a fresh tensor with the stored layout and contents."""
        tensor = stored.empty(self._device)
        self._arriving[id(tensor)] = self._copy(self._loads, as_bytes(tensor), stored.data), stored
        return tensor

    def ready(self, tensor: Tensor) -> None:
        """Let the compute stream wait until what was loaded is there."""
        arrived, _buffer = self._arriving.pop(id(tensor))
        self._wait_for(arrived)

    def join(self) -> None:
        """Let the compute stream wait until every copy is done. A whole step waits for each of its copies, so this
        matters after one that was broken off."""
        for event in list(self._last.values()):
            self._wait_for(event)
        self._arriving.clear()

    def _copy(self, stream: Stream, target: Tensor, source: Tensor) -> Any:
        """Copy on ``stream`` after all that the compute stream was given so far; return the event that it is done."""
        stream.wait_event(self._runtime.current_stream().record_event())
        with self._runtime.running_on(stream):
            target.copy_(source, non_blocking=True)
        self._last[stream] = stream.record_event()
        return self._last[stream]

    def _wait_for(self, event: Any) -> None:
        self._runtime.current_stream().wait_event(event)
        for stream, last in list(self._last.items()):
            if event is last:  # events of one stream occur in order: nothing is left to wait for
                del self._last[stream]

    def _pinned_buffer(self, nbytes: int) -> Tensor:
        free = self._free.setdefault(nbytes, [])
        if free:
            return free.pop()
        with _disable_current_modes():  # host memory is none of the step's
            return self._runtime.pinned(nbytes)


AnyHost: TypeAlias = HostMemory | StreamHost


def make_host(device: torch.device | str, runtime: Runtime | None = None) -> AnyHost:
    """Make the host memory of a step on ``device``: with streams on a GPU, or wherever a ``runtime`` is given."""
    if runtime is None and torch.device(device).type != "cuda":
        return HostMemory(device)
    return StreamHost(device, runtime if runtime is not None else CudaRuntime(device))
