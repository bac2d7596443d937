"""Swaps: host memory for tensors that leave the device, and copies on separate streams on a GPU.

There are two *copy streams*, one for each direction; operators run on the *compute stream* (the current stream). A
stream runs its work in order; work of two streams is ordered by events, and nothing here blocks the host.

    store   the store stream waits for all work enqueued on the compute stream, copies to pinned memory, and records an
            event
    wait    the compute stream waits for the event of the store
    load    memory is allocated on the compute stream; the load stream waits for all work enqueued on the compute
            stream, copies to the memory, and records an event
    ready   the compute stream waits for the event of the load; generated code calls this before the first operator
            that takes the loaded tensor or a view of it, or before `del` of the tensor if there is no such operator

A GPU has a copy engine for each direction, and PCIe and NVLink carry both directions at once, from and to pinned
memory; on a single copy stream a load would wait for every earlier store. The evaluator has the same model: one queue
for each direction, in this order, with a fixed time for each copy in addition to that of its bytes
(`magis.simulate.kernel`).

This is correct without ``Tensor.record_stream``:

* The allocator reuses freed memory in the order of the compute stream. A stored tensor is deleted after its ``wait``
  (``verify`` refuses a store without one, and a write in between), so new contents are written after the copy.
* Memory for a load may still be in use by operators that are enqueued on the compute stream but have not run, so the
  load stream waits for them. This also orders a load behind the store of the tensor, with ``wait`` between them
  (``verify`` refuses a load without one).
* Pinned buffers are allocated once and reused from step to step. A buffer is free once no name of the step and no load
  holds it; a load holds its buffer until ``ready``, after which the compute stream waits for the load. The next store
  into the buffer waits for all work enqueued on the compute stream, hence for the load, and for nothing that the plan
  does not contain.
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

# A step's data on the host: swapped tensors and states of generators, outside of torch's allocator.


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in host memory: its bytes, its layout, and the event of the copy to the host."""

    data: Any
    """A numpy array; pinned memory if the device has streams."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    arrived: Any = None

    @classmethod
    def of(cls, tensor: Tensor, data: object, arrived: object = None) -> Stored:
        return cls(data, tensor.dtype, tuple(tensor.shape), tensor.stride(), arrived)

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor with the stored layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def on_host(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy of a tensor in host memory that torch does not count; pinned for a GPU."""
    if torch.device(device).type == "cuda":
        return _laid_over(CudaRuntime(device).pinned(_reach_bytes(tensor)), tensor)
    return _laid_over(torch.from_numpy(np.empty(_reach_bytes(tensor), dtype=np.uint8)), tensor)


def is_on_host(tensor: Tensor, device: torch.device | str) -> bool:
    """Return True for a tensor that `on_host` made for a step on the device."""
    if torch.device(device).type == "cuda":
        return tensor.device.type == "cpu"
    return not tensor.untyped_storage().resizable()  # torch's own allocator makes all others


def _reach_bytes(tensor: Tensor) -> int:
    return reach(tensor.shape, tensor.stride()) * tensor.element_size()


def _laid_over(memory: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in memory given as bytes."""
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


class GeneratorStates:
    """States of a device's default generator, or of a step's own, as bytes in host memory, also for a GPU."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._generator = generator_of(device)

    def rng_save(self, own: torch.Generator | None = None) -> npt.NDArray[np.uint8]:
        """Return the generator's state."""
        with _disable_current_modes():  # states are tensors that do not belong to the step
            return (own or self._generator).get_state().numpy().copy()

    def rng_enter(self, state: npt.NDArray[np.uint8], own: torch.Generator | None = None) -> npt.NDArray[np.uint8]:
        """Set an earlier state of the generator; return the current one."""
        present = self.rng_save(own)
        self.rng_leave(state, own)
        return present

    def rng_leave(self, state: npt.NDArray[np.uint8], own: torch.Generator | None = None) -> None:
        """Restore the state from before ``rng_enter``."""
        with _disable_current_modes():
            (own or self._generator).set_state(torch.from_numpy(state))


class HostMemory(GeneratorStates):
    """Copies of tensors in plain numpy memory, with the tensors' layout; and generator states. Swapping frees nothing
    on a CPU, where host and device are one; it runs there nevertheless, so that plans with swaps can be executed and
    checked without a GPU. All copies are synchronous."""

    def store(self, tensor: Tensor, into: Stored | None = None) -> Stored:
        """Copy the bytes from the first to the last element of ``tensor`` to the host: to new memory, or ``into``
        memory that holds an earlier copy."""
        if into is None:
            return Stored.of(tensor, as_bytes(tensor).numpy().copy())
        into.data[:] = as_bytes(tensor).numpy()
        return into

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory, to stay there from step to step."""
        return on_host(tensor, "cpu")

    def copy_at(self, tensor: Tensor) -> Stored:
        """Return a tensor in host memory as the copy that a step loads, and stores into."""
        return Stored.of(tensor, as_bytes(tensor).numpy())

    def wait(self, tensor: Tensor, stored: Stored) -> None:
        """Return at once: the copy to the host is done."""

    def load(self, stored: Stored) -> Tensor:
        """Return a new tensor with the stored layout and contents."""
        tensor = stored.empty("cpu")
        as_bytes(tensor).numpy()[:] = stored.data
        return tensor

    def ready(self, tensor: Tensor) -> None:
        """Return at once: the loaded tensor is ready."""

    def join(self) -> None:
        """Return at once: every copy is done."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of the bytes from the first to the last element of a tensor, gaps included."""
    return tensor.as_strided((reach(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset()).view(torch.uint8)


class Stream(Protocol):
    """A queue of the device: ``torch.cuda.Stream``."""

    def record_event(self) -> Any:
        """Return an event that occurs when all work enqueued so far has run."""

    def wait_event(self, event: Any) -> None:
        """Make all work enqueued later wait for the event."""


class Runtime(Protocol):
    """Streams and pinned memory of a device, as needed for swapping."""

    def current_stream(self) -> Any:
        """Return the stream on which operators run."""

    def new_stream(self) -> Any:
        """Create a stream."""

    def running_on(self, stream: Any) -> AbstractContextManager[object]:
        """Enqueue the operators in the block on that stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate pinned host memory."""


class CudaRuntime:
    """Streams and pinned memory of a GPU, by ``torch.cuda``."""

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
    """The interface of ``HostMemory`` for a device with streams; the module's docstring explains its events."""

    def __init__(self, device: torch.device | str, runtime: Runtime) -> None:
        super().__init__(device)
        self._device = torch.device(device)
        self._runtime = runtime
        self._stores: Stream = runtime.new_stream()
        self._loads: Stream = runtime.new_stream()
        self._free: dict[int, list[Tensor]] = {}
        self._arriving: dict[int, tuple[Any, Stored]] = {}
        """Event of its copy and source of each loaded tensor, by the tensor's `id`."""
        self._last: dict[Stream, Any] = {}
        """Last event of each copy stream, until the compute stream has waited for the event."""

    def store(self, tensor: Tensor, into: Stored | None = None) -> Stored:
        """Enqueue the copy of a tensor's bytes to the host: to memory of its own, or ``into`` memory that holds an
        earlier copy."""
        source = as_bytes(tensor)
        if into is not None:
            return Stored.of(tensor, into.data, self._copy(self._stores, into.data, source))
        free = self._free.setdefault(source.numel(), [])
        if free:
            buffer = free.pop()
        else:
            with _disable_current_modes():  # host memory does not belong to the step
                buffer = self._runtime.pinned(source.numel())
        stored = Stored.of(tensor, buffer, self._copy(self._stores, buffer, source))
        weakref.finalize(stored, free.append, buffer).atexit = False
        return stored

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in pinned memory, to stay there from step to step."""
        return _laid_over(self._runtime.pinned(_reach_bytes(tensor)), tensor)

    def copy_at(self, tensor: Tensor) -> Stored:
        """Return a tensor in pinned memory as the copy that a step loads, and stores into."""
        return Stored.of(tensor, as_bytes(tensor))

    def wait(self, tensor: Tensor, stored: Stored) -> None:  # noqa: ARG002  (taken to keep it alive until here)
        """Make the compute stream wait for the copy to the host."""
        self._wait_for(stored.arrived)

    def load(self, stored: Stored) -> Tensor:
        """Enqueue the copy of stored contents to a new tensor with the stored layout."""
        tensor = stored.empty(self._device)
        self._arriving[id(tensor)] = self._copy(self._loads, as_bytes(tensor), stored.data), stored
        return tensor

    def ready(self, tensor: Tensor) -> None:
        """Make the compute stream wait for the copy to a loaded tensor."""
        arrived, _buffer = self._arriving.pop(id(tensor))
        self._wait_for(arrived)

    def join(self) -> None:
        """Make the compute stream wait for every copy. A whole step waits for each of its copies, so this matters only
        after a step that raised."""
        for event in list(self._last.values()):
            self._wait_for(event)
        self._arriving.clear()

    def _copy(self, stream: Stream, target: Tensor, source: Tensor) -> Any:
        """Enqueue a copy on ``stream`` behind all work enqueued on the compute stream; return the event of the copy."""
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


AnyHost: TypeAlias = HostMemory | StreamHost


def make_host(device: torch.device | str, runtime: Runtime | None = None) -> AnyHost:
    """Make the host memory of a step on ``device``: with streams on a GPU, or if a ``runtime`` is given."""
    if runtime is None and torch.device(device).type != "cuda":
        return HostMemory(device)
    return StreamHost(device, runtime if runtime is not None else CudaRuntime(device))
