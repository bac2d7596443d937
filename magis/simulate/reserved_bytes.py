"""Bytes that a GPU's caching allocator reserves for a step, with fragmentation and rounding.

The schedule is replayed as allocations and frees, twice: the second step reuses the segments of the first, and usually
needs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from magis.graph import Graph
from magis.graph.hazards import lifetimes
from magis.simulate.allocator_settings import allocator_settings
from magis.simulate.cuda_caching_allocator import CachingAllocator
from magis.simulate.simulator import Workspace

STEPS = 2


def simulated_allocator(text: str, device_bytes: int, capacity: int | None = None) -> CachingAllocator:
    """Return an allocator with settings as in PYTORCH_ALLOC_CONF, on a device with ``device_bytes``, of which it can
    get ``capacity`` (None: whatever it asks for)."""
    settings = allocator_settings(text)
    return CachingAllocator(settings, capacity=capacity, allowed=settings.allowed_bytes(device_bytes))


Event = tuple[int, int]
"""Number of an allocation, from 0 on, and its bytes; -1 bytes: free."""
RELEASE = -1


@dataclass(frozen=True)
class Reserved:
    """Peaks of some steps: of reserved segments, and of allocations (``torch.cuda.max_memory_reserved`` and
    ``max_memory_allocated``)."""

    reserved_bytes: int
    allocated_bytes: int
    segments: int
    retries: int = 0
    """Number of requests for which cached memory was released."""
    failed: bool = False
    """True if a request failed nonetheless."""


def reserved(
    graph: Graph,
    workspace: Workspace,
    deaths: Mapping[int, int] | None = None,
    *,
    steps: int = STEPS,
    allocator: CachingAllocator | None = None,
) -> Reserved:
    """Simulate a new allocator (None: with torch's defaults and unlimited memory) over a schedule; arguments as for
    ``replay``. Persistent storages are allocated first, in order.

    An operator allocates its outputs, in order, then its workspace, which it frees at once; a loop does so for each
    operator of its body, part by part. Host copies are assumed to use the one stream.
    """
    persistent = [storage.nbytes for _, storage in sorted(graph.storages.items()) if storage.persistent]
    trace = _events(graph, workspace, deaths, count())
    return replayed(persistent, trace, allocator or CachingAllocator(), steps=steps)


def replayed(
    persistent: Sequence[int], events: Iterable[Event], allocator: CachingAllocator, *, steps: int = STEPS
) -> Reserved:
    """Simulate an allocator over the bytes of persistent allocations, then over the events of a step, repeated."""
    trace = list(events)
    for name, nbytes in enumerate(persistent, 1):
        allocator.allocate(-name, nbytes)
    for _ in range(steps):
        for name, nbytes in trace:
            if nbytes == RELEASE:
                allocator.release(name)
            else:
                allocator.allocate(name, nbytes)
    return Reserved(
        allocator.most_reserved, allocator.most_allocated, allocator.segments, allocator.retries, allocator.failed
    )


def _events(
    graph: Graph, workspace: Workspace, deaths: Mapping[int, int] | None, numbers: Iterator[int]
) -> Iterator[Event]:
    """Yield the allocations and frees of one step, after which all temporary storages are freed."""
    lives = lifetimes(graph, deaths)
    names: dict[int, int] = {}
    dying: dict[int, list[int]] = {}
    for storage, position in lives.dies.items():
        dying.setdefault(position, []).append(storage)
    for position, op in enumerate(graph.ops):
        for value in op.made():
            storage = graph.values[value].storage
            fresh = lives.born.get(storage) == position and storage not in names
            if fresh and graph.storages[storage].kind == "temporary":
                names[storage] = next(numbers)
                yield names[storage], graph.storages[storage].nbytes
        if op.body is None:
            scratch = next(numbers)
            yield scratch, workspace(op, graph.values)
            yield scratch, RELEASE
        else:
            for _ in range(op.body.parts):
                yield from _events(op.body.graph, workspace, None, numbers)
        for storage in dying.get(position, ()):
            if storage in names:
                yield names.pop(storage), RELEASE
    for name in names.values():
        yield name, RELEASE
