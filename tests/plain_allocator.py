"""A plain reading of the rules of CUDA's caching allocator: slow, and without the product's code.

There are no blocks here: a segment knows its pages with memory and the allocations in it, and what is free is what is
left between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 2**20
ENDLESS = 2**62
Run = tuple[int, int]
"""Begin and end of a stretch of addresses."""


@dataclass(frozen=True)
class PlainSettings:
    expandable: bool = False
    max_split: int | None = None
    rounding: int = 20 * MIB
    large: int = 20 * MIB
    divisions: tuple[tuple[int, int], ...] = ()
    """Pairs: from so many bytes on (0, then powers of two), so many divisions."""
    threshold: float = 0.0
    fraction: float = 1.0


@dataclass(eq=False)
class Segment:
    begin: int
    small: bool
    expandable: bool
    mapped: list[Run]
    """Stretches with memory, in order, none touching the next."""
    taken: dict[int, Run] = field(default_factory=dict)
    emptied: int = 0
    """Number of searches of the pool when its last allocation was freed."""

    def free(self) -> list[Run]:
        runs = []
        taken = sorted(self.taken.values())
        for begin, end in self.mapped:
            at = begin
            for first, last in taken:
                if begin <= first < end:
                    if first > at:
                        runs.append((at, first))
                    at = last
            if at < end:
                runs.append((at, end))
        return runs

    def gaps(self) -> list[Run]:
        """The stretches without memory."""
        if not self.expandable:
            return []
        ends = [self.begin, *(end for _, end in self.mapped)]
        begins = [*(begin for begin, _ in self.mapped), ENDLESS]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    def map(self, begin: int, end: int) -> None:
        merged: list[Run] = []
        for run in sorted([*self.mapped, (begin, end)]):
            if merged and merged[-1][1] == run[0]:
                merged[-1] = merged[-1][0], run[1]
            else:
                merged.append(run)
        self.mapped = merged

    def unmap(self, begin: int, end: int) -> None:
        cut = []
        for first, last in self.mapped:
            if first <= begin and end <= last:
                cut += [(first, begin), (end, last)]
            else:
                cut.append((first, last))
        self.mapped = [run for run in cut if run[0] < run[1]]

    @property
    def size(self) -> int:
        return sum(end - begin for begin, end in self.mapped)


def length(run: Run) -> int:
    return run[1] - run[0]


def up(nbytes: int, step: int) -> int:
    return (nbytes + step - 1) // step * step


class PlainAllocator:
    def __init__(
        self, settings: PlainSettings | None = None, capacity: int | None = None, allowed: int | None = None
    ) -> None:
        self.settings = settings or PlainSettings()
        self.capacity = ENDLESS if capacity is None else capacity
        self.allowed = ENDLESS if allowed is None else allowed
        self.collects = allowed is not None and self.settings.threshold > 0
        self.segments: list[Segment] = []
        self.searches = {True: 0, False: 0}
        self.end = self.most_reserved = self.most_allocated = self.retries = 0
        self.failed = False

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def allocated(self) -> int:
        return sum(length(run) for segment in self.segments for run in segment.taken.values())

    def place(self, name: int) -> int | None:
        return next((segment.taken[name][0] for segment in self.segments if name in segment.taken), None)

    def rounded(self, nbytes: int) -> int:
        nbytes = max(nbytes, 1)
        divisions = 0
        for least, count in self.settings.divisions:
            if nbytes >= least:
                divisions = count
        if divisions <= 1 or nbytes <= 512 * divisions:
            return up(nbytes, 512)
        power = 512
        while 2 * power <= nbytes:
            power *= 2
        return next(size for part in range(divisions + 1) if (size := power + power * part // divisions) >= nbytes)

    def allocate(self, name: int, nbytes: int) -> None:
        if not nbytes:
            return
        wanted = self.rounded(nbytes)
        small = wanted <= MIB
        found = self.search(small, wanted) or self.obtain(small, wanted)
        segment, (begin, end) = found
        left = end - begin - wanted
        if small or self.settings.expandable:
            splits = left >= 512
        else:
            splits = left > MIB and (self.settings.max_split is None or wanted < self.settings.max_split)
        segment.taken[name] = (begin, begin + wanted if splits else end)
        self.most_allocated = max(self.most_allocated, self.allocated)

    def release(self, name: int) -> None:
        for segment in self.segments:
            if name in segment.taken:
                del segment.taken[name]
                if not segment.taken:
                    segment.emptied = self.searches[segment.small]

    def free(self, small: bool) -> list[tuple[Segment, Run]]:
        """All that is free in a pool, smallest first, at equal sizes by address."""
        found = [(segment, run) for segment in self.segments if segment.small == small for run in segment.free()]
        return sorted(found, key=lambda each: (length(each[1]), each[1][0]))

    def search(self, small: bool, wanted: int) -> tuple[Segment, Run] | None:
        if self.collects:
            self.searches[small] += 1
        fits = [each for each in self.free(small) if length(each[1]) >= wanted]
        if not fits:
            return None
        best = fits[0]
        if self.settings.expandable:
            for other in fits[1:]:
                if room(*other) >= room(*best):
                    break
                best = other
        limit = self.settings.max_split
        size = length(best[1])
        if limit is not None and wanted < limit <= size:
            return None
        if limit is not None and wanted >= limit and size >= wanted + self.settings.rounding:
            return None
        return best

    def obtain(self, small: bool, wanted: int) -> tuple[Segment, Run]:
        if self.collects:
            self.collect()
        found = self.grow(small, wanted)
        if found is None:
            self.retries += 1
        if found is None and self.release_oversize(small, wanted):
            found = self.grow(small, wanted)
        if found is None:
            self.empty_cache()
            found = self.grow(small, wanted)
        if found is None:
            self.failed, self.collects = True, False
            self.capacity = self.allowed = ENDLESS
            return self.obtain(small, wanted)
        self.most_reserved = max(self.most_reserved, self.reserved)
        return found

    def grow(self, small: bool, wanted: int) -> tuple[Segment, Run] | None:
        if small:
            size = 2 * MIB
        elif wanted < 10 * MIB:
            size = self.settings.large
        else:
            size = up(wanted, 2 * MIB)
        if self.reserved + size > self.allowed:
            return None
        if self.settings.expandable:
            return self.extend(small, wanted)
        if self.reserved + size > self.capacity:
            return None
        segment = Segment(self.end, small, False, [(self.end, self.end + size)])
        self.segments.append(segment)
        self.end += size
        return segment, segment.mapped[0]

    def extend(self, small: bool, wanted: int) -> tuple[Segment, Run] | None:
        page = 2 * MIB if small else self.settings.large
        segment = next((each for each in self.segments if each.small == small), None)
        if segment is None:
            segment = Segment(0, small, True, [])
            self.segments.append(segment)
        for gap in segment.gaps():
            begin = next((run[0] for run in segment.free() if run[1] == gap[0]), gap[0])
            end = next((first for first, _ in sorted(segment.taken.values()) if first >= begin), ENDLESS)
            if end - begin < wanted:
                continue
            while (have := next((length(run) for run in segment.free() if run[0] == begin), 0)) < wanted:
                first, last = next(each for each in segment.gaps() if each[0] == begin + have)
                more = up(min(wanted - have, last - first), page)
                if self.reserved + more > self.capacity:
                    return None
                segment.map(first, first + more)
                self.most_reserved = max(self.most_reserved, self.reserved)
            return segment, next(run for run in segment.free() if run[0] == begin)
        raise ValueError("the last gap is endless")

    def whole(self, small: bool) -> Iterator[Segment]:
        """Ordinary segments that are free from end to end, by size and address."""
        for segment in sorted(self.segments, key=lambda each: (each.size, each.begin)):
            if segment.small == small and not segment.expandable and not segment.taken:
                yield segment

    def collect(self) -> None:
        target = self.reserved - int(self.settings.threshold * self.allowed)
        freed = 0
        while target > 0 and freed < target and (whole := list(self.whole(small=False))):
            ages = {segment.begin: self.searches[False] - segment.emptied for segment in whole}
            mean = sum(ages.values()) / len(ages)
            for segment in whole:
                if ages[segment.begin] >= mean:
                    freed += segment.size
                    self.segments.remove(segment)

    def release_oversize(self, small: bool, wanted: int) -> bool:
        limit = self.settings.max_split
        if limit is None or self.settings.expandable:
            return False
        target = max(wanted, limit)
        large = [segment for segment in self.whole(small) if segment.size >= limit]
        enough = [segment for segment in large if segment.size >= target]
        if enough:
            self.segments.remove(enough[0])
            return True
        freed = 0
        for segment in reversed(large):
            if freed >= target:
                break
            freed += segment.size
            self.segments.remove(segment)
        return freed >= target

    def empty_cache(self) -> None:
        for small in (False, True):
            for segment in list(self.whole(small)):
                self.segments.remove(segment)
        for segment in self.segments:
            page = 2 * MIB if segment.small else self.settings.large
            for begin, end in segment.free() if segment.expandable else []:
                if up(begin, page) < end // page * page:
                    segment.unmap(up(begin, page), end // page * page)


def room(segment: Segment, run: Run) -> int:
    """What a free stretch could grow to."""
    behind = next((length(gap) for gap in segment.gaps() if gap[0] == run[1]), 0)
    return length(run) + behind
