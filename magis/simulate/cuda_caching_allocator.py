"""Simulation of PyTorch's CUDA caching allocator: the bytes that it reserves for a step, predicted without a GPU.

    allocate --(rounded)--> best fitting free block of its pool, split if enough is left over, else a new segment
    free     --> the block, merged with free neighbours in its segment

The rules are those of ``c10/cuda/CUDACachingAllocator`` with the settings of PYTORCH_ALLOC_CONF, on one stream.
Segments are assumed to have increasing addresses, which only breaks ties between free blocks of equal size; the address
space of an expandable segment is assumed to suffice. As in ``torch.cuda.memory_allocated``, an allocated block counts
with its unused rest. Not yet compared with a GPU.

Memory goes back to the device only where it runs out (``capacity``), or beyond the settings' threshold: then free
segments are released, and pages of expandable ones unmapped, and the request is tried again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from magis.simulate.allocator_settings import DEFAULTS, OWN_SEGMENT, AllocatorSettings
from magis.simulate.simulator import rounded
from magis.units import MIB

ROUNDING = 512
SMALL = MIB
"""Requests of at most this size use the small pool."""
SMALL_SEGMENT = 2 * MIB
"""Size of a segment of the small pool, and page of its expandable one."""
SEGMENT_ROUNDING = 2 * MIB
UNLIMITED = 1 << 62
"""Address space of an expandable segment."""
FAR = 1 << 44
"""Distance of the two expandable segments, in addresses that are told."""


@dataclass(eq=False)
class _Block:
    """A block of a segment; neighbours are None at the segment's ends."""

    start: int
    nbytes: int
    before: _Block | None = None
    behind: _Block | None = None
    free: bool = True
    mapped: bool = True
    """False for address space of an expandable segment without memory."""
    since: int = 0
    """Searches of the pool until the block was freed."""

    @property
    def is_whole(self) -> bool:
        """Return True if the block is all of a segment."""
        return self.before is None and self.behind is None

    @property
    def room(self) -> int:
        """Size to which the block can grow."""
        behind = self.behind
        return self.nbytes + (behind.nbytes if behind is not None and not behind.mapped else 0)


@dataclass
class _Pool:
    """Free blocks by size, then address; address space without memory."""

    small: bool
    page: int
    order: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    unmapped: dict[int, _Block] = field(default_factory=dict)
    searches: int = 0
    """Number of searches while a threshold is set: the clock of its garbage collection."""

    def put(self, block: _Block) -> None:
        block.free = True
        if not block.mapped:
            self.unmapped[block.start] = block
            return
        block.since = self.searches
        bisect.insort(self.order, (block.nbytes, block.start))
        self.blocks[block.start] = block

    def drop(self, block: _Block) -> None:
        if not block.mapped:
            del self.unmapped[block.start]
            return
        del self.order[bisect.bisect_left(self.order, (block.nbytes, block.start))]
        del self.blocks[block.start]

    def at_least(self, nbytes: int) -> int:
        """Return the place in ``order`` of the first block of at least ``nbytes``."""
        return bisect.bisect_left(self.order, (nbytes, 0))

    def block(self, place: int) -> _Block:
        return self.blocks[self.order[place][1]]

    def free_blocks(self) -> list[_Block]:
        return [self.blocks[start] for _, start in self.order]

    def split(self, block: _Block, nbytes: int) -> _Block:
        """Cut a block after ``nbytes``, and return the rest, which is free."""
        rest = _Block(block.start + nbytes, block.nbytes - nbytes, block, block.behind, mapped=block.mapped)
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.nbytes = rest, nbytes
        self.put(rest)
        return rest

    def put_merged(self, block: _Block) -> _Block:
        """Merge a block with its free neighbours of its kind, put it back, and return it."""
        for other in (block.before, block.behind):
            if other is None or not other.free or other.mapped != block.mapped:
                continue
            self.drop(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.nbytes += second.nbytes
            first.behind = second.behind
            if second.behind is not None:
                second.behind.before = first
            block = first
        self.put(block)
        return block


class PlacedBlock(NamedTuple):
    """A block with memory: its address, bytes and allocation (None: it is free)."""

    address: int
    nbytes: int
    name: int | None
    small: bool
    """True if it is of the small pool."""
    first: bool
    """True if a segment begins with it."""


class CachingAllocator:
    """Simulated allocator with named allocations; counts bytes reserved and allocated, now and at the most.

    ``capacity``: bytes that the device has for it; ``allowed``: those that the process may reserve (None: no limit).
    Neither holds from the first request on that fails.
    """

    def __init__(
        self, settings: AllocatorSettings = DEFAULTS, *, capacity: int | None = None, allowed: int | None = None
    ) -> None:
        self.reserved = self.most_reserved = self.allocated = self.most_allocated = 0
        self.segments = 0
        """Number of segments, or maps of pages, that were made."""
        self.changes: list[tuple[str, int, int]] = []
        """Segments and pages made and released, in the words of torch's snapshots: action, address, bytes."""
        self.retries, self.failed = 0, False
        """Number of requests for which cached memory was released; True if one failed nonetheless."""
        self._settings = settings
        self._capacity, self._allowed = capacity or UNLIMITED, allowed or UNLIMITED
        self._small, self._large = _Pool(True, SMALL_SEGMENT), _Pool(False, settings.large_segment_bytes)
        self._taken: dict[int, tuple[_Pool, _Block]] = {}
        self._end = 0
        """Next free address."""
        self._collects = allowed is not None and settings.collection_threshold > 0

    def allocate(self, name: int, nbytes: int) -> None:
        """Allocate ``nbytes`` under a name; 0 bytes do nothing. Raises ValueError if the name is in use."""
        if name in self._taken:
            raise ValueError(f"allocation {name} is not free")
        if nbytes <= 0:
            return
        wanted = self._settings.rounded(nbytes)
        pool = self._small if wanted <= SMALL else self._large
        block = self._cached(pool, wanted) or self._fresh(pool, wanted)
        left = block.nbytes - wanted
        if pool.small or self._settings.expandable_segments:
            splits = left >= ROUNDING
        else:
            splits = wanted < self._settings.max_split_bytes and left > SMALL
        if splits:
            pool.split(block, wanted)
        block.free = False
        self._taken[name] = pool, block
        self.allocated += block.nbytes
        self.most_allocated = max(self.most_allocated, self.allocated)

    def release(self, name: int) -> None:
        """Free the allocation of a name, if there is one."""
        if name in self._taken:
            pool, block = self._taken.pop(name)
            self.allocated -= block.nbytes
            pool.put_merged(block)

    def address(self, name: int) -> int:
        """Return the address of an allocation."""
        return self._address(*self._taken[name])

    def blocks(self) -> Iterator[PlacedBlock]:
        """Yield all blocks with memory in the order of their addresses."""
        taken = [(pool, block, name) for name, (pool, block) in self._taken.items()]
        free = [(pool, block, None) for pool in (self._small, self._large) for block in pool.free_blocks()]
        for pool, block, name in sorted([*taken, *free], key=lambda each: self._address(*each[:2])):
            first = block.before is None or not block.before.mapped
            yield PlacedBlock(self._address(pool, block), block.nbytes, name, pool.small, first)

    def _address(self, pool: _Pool, block: _Block) -> int:
        return block.start + (FAR if self._settings.expandable_segments and not pool.small else 0)

    def _cached(self, pool: _Pool, wanted: int) -> _Block | None:
        """Take the best fitting free block out of its pool; None if there is none that may serve the request."""
        pool.searches += self._collects
        place, most = pool.at_least(wanted), self._settings.max_split_bytes
        if place == len(pool.order):
            return None
        block = pool.block(place)
        if self._settings.expandable_segments:  # the block that can grow least, among the next larger ones
            for start in range(place + 1, len(pool.order)):
                if pool.block(start).room >= block.room:
                    break
                block = pool.block(start)
        oversize = self._settings.max_rounding_bytes + wanted if wanted >= most else most
        if block.nbytes >= oversize:
            return None
        pool.drop(block)
        return block

    def _fresh(self, pool: _Pool, wanted: int) -> _Block:
        """Return a block of new memory, for which cached memory is released if need be."""
        if self._collects:
            self._collect()
        block = self._new(pool, wanted)
        self.retries += block is None
        if block is None and self._release_oversize(pool, wanted):
            block = self._new(pool, wanted)
        if block is None:
            self._release_all()
            block = self._new(pool, wanted)
        if block is not None:
            return block
        self.failed, self._collects = True, False
        self._capacity = self._allowed = UNLIMITED
        return self._fresh(pool, wanted)

    def _new(self, pool: _Pool, wanted: int) -> _Block | None:
        """Return a block of a new segment, or of new pages; None if the device has no memory for it."""
        nbytes = SMALL_SEGMENT if pool.small else self._settings.large_segment_bytes
        if wanted >= OWN_SEGMENT:
            nbytes = rounded(wanted, SEGMENT_ROUNDING)
        if self.reserved + nbytes > self._allowed:
            return None
        if self._settings.expandable_segments:
            return self._expanded(pool, wanted)
        if not self._take(nbytes):
            return None
        block = _Block(self._end, nbytes)  # segments never join, so its first block has no neighbours
        self.changes.append(("segment_alloc", self._end, nbytes))
        self._end += nbytes
        return block

    def _take(self, nbytes: int) -> bool:
        """Reserve bytes of the device; return False if it has not so many."""
        if self.reserved + nbytes > self._capacity:
            return False
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)
        self.segments += 1
        return True

    def _expanded(self, pool: _Pool, wanted: int) -> _Block | None:
        """Map pages at the lowest address with room for a block, free memory in front of them included."""
        if not pool.unmapped:
            pool.put(_Block(0, UNLIMITED, mapped=False))
        block = next(each for each in map(_with_free_front, _by_address(pool.unmapped)) if _has_room(each, wanted))
        while not block.mapped or block.nbytes < wanted:
            gap = block.behind if block.mapped else block
            left = wanted - block.nbytes if block.mapped else wanted
            if gap is None:
                return None
            nbytes = rounded(min(left, gap.nbytes), pool.page)
            if not self._take(nbytes):
                return None
            pool.drop(gap)
            if nbytes < gap.nbytes:
                pool.split(gap, nbytes)
            gap.mapped = True
            self.changes.append(("segment_map", self._address(pool, gap), nbytes))
            block = pool.put_merged(gap)
        pool.drop(block)
        return block

    def _give_back(self, pool: _Pool, block: _Block) -> None:
        """Release a free block that is a whole segment."""
        pool.drop(block)
        self.reserved -= block.nbytes
        self.changes.append(("segment_free", block.start, block.nbytes))

    def _collect(self) -> None:
        """Free whole segments of large blocks that were not used for longer than the mean, until enough is free."""
        excess = self.reserved - int(self._settings.collection_threshold * self._allowed)
        pool, freed = self._large, 0
        whole = [] if self._settings.expandable_segments else [each for each in pool.free_blocks() if each.is_whole]
        while freed < excess and whole:
            ages = [pool.searches - each.since for each in whole]
            old = [each for each, age in zip(whole, ages, strict=True) if age * len(ages) >= sum(ages)]
            for block in old:
                freed += block.nbytes
                self._give_back(pool, block)
            whole = [each for each in whole if each not in old]

    def _release_oversize(self, pool: _Pool, wanted: int) -> bool:
        """Release a free block that is never split and large enough, else the largest ones; return True if that is
        enough."""
        most = self._settings.max_split_bytes
        if most == DEFAULTS.max_split_bytes or self._settings.expandable_segments:
            return False
        least, freed = max(wanted, int(most)), 0
        place = pool.at_least(least)
        if place < len(pool.order):
            self._give_back(pool, pool.block(place))
            return True
        while freed < least and pool.order and pool.order[-1][0] >= most:
            freed += pool.order[-1][0]
            self._give_back(pool, pool.block(-1))
        return freed >= least

    def _release_all(self) -> None:
        """Release all whole segments that are free, and unmap all free pages."""
        for pool in (self._large, self._small):
            for block in pool.free_blocks():
                if self._settings.expandable_segments:
                    self._unmap(pool, block)
                elif block.is_whole:
                    self._give_back(pool, block)

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        begin, end = rounded(block.start, pool.page), (block.start + block.nbytes) // pool.page * pool.page
        if begin >= end:
            return
        pool.drop(block)
        if end < block.start + block.nbytes:
            pool.split(block, end - block.start)
        if begin > block.start:
            front, block = block, pool.split(block, begin - block.start)
            pool.put(front)
            pool.drop(block)
        self.reserved -= block.nbytes
        self.changes.append(("segment_unmap", self._address(pool, block), block.nbytes))
        block.mapped = False
        pool.put_merged(block)


def _by_address(blocks: Mapping[int, _Block]) -> list[_Block]:
    return [blocks[start] for start in sorted(blocks)]


def _with_free_front(block: _Block) -> _Block:
    """Return the block before if it is free, else the block."""
    return block.before if block.before is not None and block.before.free else block


def _has_room(block: _Block | None, wanted: int) -> bool:
    """Return True if a block and the free ones behind it have ``wanted`` bytes of addresses."""
    nbytes = 0
    while nbytes < wanted and block is not None and block.free:
        nbytes += block.nbytes
        block = block.behind
    return nbytes >= wanted
