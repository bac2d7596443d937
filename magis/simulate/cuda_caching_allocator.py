"""Simulation of PyTorch's CUDA caching allocator: the bytes that it reserves for a step, predicted without a GPU.

    allocate --(512 B)--> best fitting free block of its pool, split if enough is left over, else a new segment
    free     --> the block, merged with free neighbours in its segment

The rules are those of ``c10/cuda/CUDACachingAllocator`` with default settings: no expandable segments, no limit on the
size of blocks that are split, one stream, no cudaFree. Segments are assumed to have increasing addresses, which only
breaks ties between free blocks of equal size. As in ``torch.cuda.memory_allocated``, an allocated block counts with its
unused rest. Not yet compared with a GPU.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from magis.graph import Graph
from magis.graph.hazards import lifetimes
from magis.simulate.simulator import Workspace, rounded
from magis.units import MIB

ROUNDING = 512
SMALL = MIB
"""Requests of at most this size use the small pool."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB
"""Requests of at least this size get a segment of their own size, rounded up to ``SEGMENT_ROUNDING``."""
SEGMENT_ROUNDING = 2 * MIB


def segment_bytes(nbytes: int) -> int:
    """Return the size of a new segment for a request of ``nbytes`` (a multiple of 512)."""
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if nbytes < OWN_SEGMENT else rounded(nbytes, SEGMENT_ROUNDING)


@dataclass(eq=False)
class _Block:
    """A block of a segment; neighbours are None at the segment's ends."""

    start: int
    nbytes: int
    small: bool
    before: _Block | None = None
    behind: _Block | None = None
    free: bool = True


@dataclass
class _Pool:
    """Free blocks by size, then address."""

    order: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)

    def put(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self.order, (block.nbytes, block.start))
        self.blocks[block.start] = block

    def drop(self, block: _Block) -> None:
        block.free = False
        del self.order[bisect.bisect_left(self.order, (block.nbytes, block.start))]
        del self.blocks[block.start]

    def best(self, nbytes: int) -> _Block | None:
        at = bisect.bisect_left(self.order, (nbytes, 0))
        return self.blocks[self.order[at][1]] if at < len(self.order) else None


class CachingAllocator:
    """Simulated allocator with named allocations; counts bytes reserved, allocated, and allocated at the peak."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.most_allocated = self.segments = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._taken: dict[int, _Block] = {}

    def allocate(self, name: int, nbytes: int) -> None:
        """Allocate ``nbytes`` under a name; 0 bytes do nothing. Raises ValueError if the name is in use."""
        if name in self._taken:
            raise ValueError(f"allocation {name} is not free")
        if nbytes <= 0:
            return
        wanted = rounded(nbytes, ROUNDING)
        small = wanted <= SMALL
        pool = self._pools[small]
        block = pool.best(wanted)
        if block is None:  # a new segment: segments never join, so its first block has no neighbours
            block = _Block(self.reserved, segment_bytes(wanted), small)
            self.reserved += block.nbytes
            self.segments += 1
        else:
            pool.drop(block)
        left = block.nbytes - wanted
        if left >= ROUNDING if small else left > SMALL:  # split the block
            rest = _Block(block.start + wanted, left, small, block, block.behind)
            if block.behind is not None:
                block.behind.before = rest
            block.behind, block.nbytes = rest, wanted
            pool.put(rest)
        block.free = False
        self._taken[name] = block
        self.allocated += block.nbytes
        self.most_allocated = max(self.most_allocated, self.allocated)

    def release(self, name: int) -> None:
        """Free the allocation of a name, if there is one."""
        block = self._taken.pop(name, None)
        if block is None:
            return
        self.allocated -= block.nbytes
        pool = self._pools[block.small]
        if block.before is not None and block.before.free:
            pool.drop(block.before)
            block = _joined(block.before, block)
        if block.behind is not None and block.behind.free:
            pool.drop(block.behind)
            block = _joined(block, block.behind)
        pool.put(block)


def _joined(first: _Block, second: _Block) -> _Block:
    """Merge two neighbouring blocks into the first."""
    first.nbytes += second.nbytes
    first.behind = second.behind
    if second.behind is not None:
        second.behind.before = first
    return first


# Bytes that the caching allocator reserves for a step, with fragmentation and rounding.
# The schedule is replayed as allocations and frees on `CachingAllocator`, twice: the second step reuses the
# segments of the first, and usually needs no more.

STEPS = 2
Event = tuple[int, int]
"""Index of an allocation, and its bytes; -1 bytes: free."""
RELEASE = -1


@dataclass(frozen=True)
class Reserved:
    """Bytes after some steps: reserved segments, and the peak of allocations (``torch.cuda.max_memory_reserved`` and
    ``max_memory_allocated``)."""

    reserved_bytes: int
    allocated_bytes: int
    segments: int


def reserved(
    graph: Graph, workspace: Workspace, *, deaths: Mapping[int, int] | None = None, steps: int = STEPS
) -> Reserved:
    """Simulate the allocator over a schedule; arguments as for ``replay``. Persistent storages are allocated first, in
    order.

    An operator allocates its outputs, in order, then its workspace, which it frees at once; a loop does so for each
    operator of its body, part by part. Host copies are assumed to use the one stream.
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
