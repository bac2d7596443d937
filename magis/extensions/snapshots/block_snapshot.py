"""Measured blocks of code (`magis.peak`) as memory snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from magis.cases.tensor_ledger import CARRIED_OVER
from magis.extensions.snapshots.memory_snapshot import WORKSPACE, CallStacks, Change, save, snapshot
from magis.runtime.measure import Allocation
from magis.simulate.cuda_caching_allocator import CachingAllocator
from magis.simulate.reserved_bytes import RELEASE

Places = Mapping[tuple[int, int], Sequence[tuple[str, str, str, str]]]
"""Kind, module, phase and line of tensors by address and bytes, in the order in which they were made."""


def save_block(path: str | Path, events: Sequence[Allocation], older: Mapping[int, int], places: Places) -> None:
    """Write logged events to a file. ``older`` are bytes that an earlier block has left, by address; as in ``replay``,
    those that are freed count."""
    touched = {event.address for event in events}
    left = {address: nbytes for address, nbytes in older.items() if address in touched}
    frames = CallStacks().of(CARRIED_OVER, "")
    before = [Change(-address, nbytes, 0, nbytes, CARRIED_OVER, frames) for address, nbytes in left.items()]
    save(path, lambda: snapshot(before, _changes(events, left, places), CachingAllocator()))


def _changes(events: Sequence[Allocation], older: Mapping[int, int], places: Places) -> Iterator[Change]:
    stacks, numbers, live = CallStacks(), count(), {address: -address for address in older}
    left = {key: iter(found) for key, found in places.items()}
    for event in events:
        if event.address in live:  # an address that is allocated again was freed outside of the log
            yield Change(live.pop(event.address), RELEASE, event.time_ns)
        if event.nbytes > 0:
            place = next(left.get((event.address, event.nbytes), iter(())), (WORKSPACE, "", "", ""))
            live[event.address] = next(numbers)
            frames = stacks.of(event.op or place[0], *place[1:])
            yield Change(live[event.address], event.nbytes, event.time_ns, event.nbytes, place[0], frames)
