"""Bytes that a GPU's caching allocator reserves for a step, with fragmentation and rounding.

The schedule is replayed as allocations and frees, twice: the second step reuses the segments of the first, and usually
needs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from magis.graph import Graph, Op
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


class StepEvent(NamedTuple):
    """An allocation or a free of a step."""

    name: int
    nbytes: int
    op: Op | None
    """Operator during which it happens; None: it is freed behind the step."""
    storage: int | None = None
    """Storage of the graph of the operator; None: the operator's workspace."""


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
    trace = ((each.name, each.nbytes) for each in step_events(graph, workspace, deaths, count()))
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


def step_events(
    graph: Graph, workspace: Workspace, deaths: Mapping[int, int] | None, numbers: Iterator[int]
) -> Iterator[StepEvent]:
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
                yield StepEvent(names[storage], graph.storages[storage].nbytes, op, storage)
        if op.body is None:
            scratch = next(numbers)
            yield StepEvent(scratch, workspace(op, graph.values), op)
            yield StepEvent(scratch, RELEASE, op)
        else:
            for _ in range(op.body.parts):
                yield from step_events(op.body.graph, workspace, None, numbers)
        for storage in dying.get(position, ()):
            if storage in names:
                yield StepEvent(names.pop(storage), RELEASE, op, storage)
    for storage, name in names.items():
        yield StepEvent(name, RELEASE, None, storage)
