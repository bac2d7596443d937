"""What a GPU's caching allocator reserves for a step: fragmentation and rounding included, predicted without a GPU.

The schedule is replayed as allocations and releases through the allocator's rules (``caching``), twice: a second step
finds the segments of the first, and usually needs no further ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from magis.analysis.liveness import lifetimes
from magis.ir import Graph
from magis.simulate.caching import CachingAllocator
from magis.simulate.replay import Workspace

__all__ = ["Reserved", "reserved"]

STEPS = 2
Event = tuple[int, int]
"""A number of an allocation, and its bytes; -1: it is released."""
RELEASE = -1


@dataclass(frozen=True)
class Reserved:
    """Bytes after some steps: asked of the driver, and handed out at most (``torch.cuda.max_memory_reserved`` and
    ``max_memory_allocated``)."""

    reserved_bytes: int
    allocated_bytes: int
    segments: int

    @property
    def unused_bytes(self) -> int:
        """Reserved, but never handed out at the moment of the peak: fragmentation and rounding."""
        return self.reserved_bytes - self.allocated_bytes


def reserved(
    graph: Graph, workspace: Workspace, *, deaths: Mapping[int, int] | None = None, steps: int = STEPS
) -> Reserved:
    """Replay the schedule; arguments as for ``replay``. Persistent storages come first, in order, and stay.

    An operator allocates what it makes, in order, then its scratch, which it releases at once; a loop does so for the
    operators of its body, part by part. Copies to and from the host are assumed to share the one stream.
    """
    allocator = CachingAllocator()
    numbers = count()
    for storage in sorted(graph.storages):
        if graph.storages[storage].persistent:
            allocator.allocate(next(numbers), graph.storages[storage].nbytes)
    trace = list(_events(graph, workspace, deaths, numbers))
    for _ in range(steps):
        for name, nbytes in trace:
            if nbytes == RELEASE:
                allocator.release(name)
            else:
                allocator.allocate(name, nbytes)
    return Reserved(allocator.reserved, allocator.most_allocated, allocator.segments)


def _events(
    graph: Graph, workspace: Workspace, deaths: Mapping[int, int] | None, numbers: Iterator[int]
) -> Iterator[Event]:
    """One step, after which all temporary storages are released."""
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
