"""The evaluator's compiled passes: from a plan to its events, peak and latency.

Four passes: lazy recursive recomputation, weight updates as early as possible, swaps on one copy stream per direction,
bytes. All use integer arithmetic on preallocated arrays. All compiled code is in this file, since numba's on-disk cache
checks the age of a compiled function's own file only. Arrays are bound to local names because numba counts references
on every access through a tuple, which takes longer than the work itself. Each entry is compiled when it is first
called: the passes of swaps only where there is a host link.

For steps with overlapped collectives, ``message_passes`` runs between ``begin_plan`` and ``finish_plan``.
"""

from __future__ import annotations

import numba
import numpy as np

from magis.simulate.arrays import Gaps, NodeStep, WorkingArrays, part
from magis.simulate.problem import DROP, KEEP, REPEAT, SWAP, Int8s, Int32s

FOREVER = 2**31 - 1
MOST_COPIES = 8  # recomputed copies of a storage flagged REPEAT: the last one stays to its last use
# Slots of the result array.
PEAK, TENSOR_PEAK, LATENCY, PEAK_EVENT, N_EVENTS, N_REDOS, N_SWAPS, N_BETWEEN, TIMED = range(9)


@part
def _set_until(step: NodeStep, gaps: Gaps, flags: Int8s, scratch: WorkingArrays) -> bool:
    """Set the last position of first copies, and the position from which others stay; return True if the plan swaps."""
    start, end, last = gaps
    scratch.result[N_BETWEEN] = scratch.result[TIMED] = 0
    until, redo_at, redoable, stays_from = scratch.until, scratch.redo_at, step.redoable, scratch.stays_from
    swaps = False
    for storage in range(len(flags)):
        flag = flags[storage]
        redo_at[storage] = -1
        until[storage] = FOREVER
        stays_from[storage] = 0
        if flag == SWAP:
            swaps = True
        elif redoable[storage] and flag != KEEP:
            until[storage] = start[storage] if flag != DROP and start[storage] >= 0 else last[storage]
            if flag == REPEAT:
                scratch.result[N_BETWEEN] = 1
                stays_from[storage] = end[storage] if start[storage] >= 0 else FOREVER
                scratch.replaced[storage] = 0
    return swaps


@part
def _replace_copy(step: NodeStep, scratch: WorkingArrays, storage: int, between: int) -> int:
    """End a recomputed copy at its last use, since another one follows; return the number of copies in ``between``. The
    output of that last use may reuse its memory."""
    (reuse_ptr, reuse_idx), event, reuse = step.reuses, scratch.event, scratch.reuse
    used_at = scratch.last_use[len(step.nbytes) + storage]
    scratch.free[used_at] += step.nbytes[storage]
    node = event[used_at] >> 1
    for k in range(reuse_ptr[node], reuse_ptr[node + 1]):
        if reuse_idx[k] == reuse[used_at]:
            break  # an input that is listed earlier dies there
        if reuse_idx[k] == storage:
            reuse[used_at] = storage
    scratch.between[between, 0] = storage
    scratch.between[between, 1] = scratch.redo_at[storage]
    scratch.between[between, 2] = used_at
    scratch.replaced[storage] += 1
    if scratch.replaced[storage] == MOST_COPIES - 1:
        scratch.stays_from[storage] = 0
    return between + 1


@part
def _expand(step: NodeStep, order: Int32s, scratch: WorkingArrays) -> int:
    """Pass 1: insert recomputations before each node that needs them; return the number of events."""
    (in_ptr, in_idx), (out_ptr, out_idx) = step.inputs, step.outputs
    producer, nbytes, redo_ns = step.producer, step.nbytes, step.ns[1]
    until, stack, event = scratch.until, scratch.stack, scratch.event
    first_at, again_at, redo_at = scratch.first_at, scratch.again_at, scratch.redo_at
    last_use, free, reuse, stays_from = scratch.last_use, scratch.free, scratch.reuse, scratch.stays_from
    storages = len(nbytes)
    spent = count = 0
    for block in range(len(step.blk_ns)):
        spent += step.blk_ns[block]
    between = int(np.int64(0))
    for position in range(len(order)):
        node = order[position]
        for k in range(in_ptr[node], in_ptr[node + 1]):
            wanted = in_idx[k]
            if until[wanted] >= position:
                continue
            stack[0, 0] = producer[wanted]
            stack[0, 1] = in_ptr[producer[wanted]]
            depth = 1
            while depth > 0:
                maker = stack[depth - 1, 0]
                at = stack[depth - 1, 1]
                end = in_ptr[maker + 1]
                while at < end and until[in_idx[at]] >= position:
                    at += 1
                if at < end:  # recompute this input first, then continue with the next
                    stack[depth - 1, 1] = at
                    stack[depth, 0] = producer[in_idx[at]]
                    stack[depth, 1] = in_ptr[producer[in_idx[at]]]
                    depth += 1
                    continue
                depth -= 1
                for j in range(in_ptr[maker], end):
                    used = in_idx[j]
                    last_use[used if redo_at[used] < 0 else storages + used] = count
                for j in range(out_ptr[maker], out_ptr[maker + 1]):
                    made = out_idx[j]
                    if until[made] < position:
                        if redo_at[made] >= 0:
                            between = _replace_copy(step, scratch, made, between)
                        until[made] = FOREVER if position >= stays_from[made] else position
                        redo_at[made] = count
                        last_use[storages + made] = count
                    else:
                        free[count] += nbytes[made]
                again_at[maker] = count
                reuse[count] = -1
                event[count] = 2 * maker + 1
                spent += redo_ns[maker]
                count += 1
        for k in range(in_ptr[node], in_ptr[node + 1]):
            used = in_idx[k]
            last_use[used if redo_at[used] < 0 else storages + used] = count
        for k in range(out_ptr[node], out_ptr[node + 1]):
            last_use[out_idx[k]] = count
        first_at[node] = count
        again_at[node] = count
        reuse[count] = -1
        event[count] = 2 * node
        spent += step.ns[0, node]
        count += 1
    scratch.result[N_EVENTS] = count
    scratch.result[N_REDOS] = count - len(order)
    scratch.result[N_BETWEEN] = between
    scratch.result[LATENCY] = spent
    return count


@part
def _place_blocks(step: NodeStep, scratch: WorkingArrays, count: int) -> None:
    """Pass 2: place every update block after the last event that it depends on; ``TIMED``: not before its place."""
    timed = scratch.result[TIMED] != 0
    (in_ptr, in_idx), (after_ptr, after_idx) = step.block_inputs, step.block_after
    first_at, again_at, last_write = scratch.first_at, scratch.again_at, step.last_write
    place_of, head, link, held_by = scratch.blk_place, scratch.blk_head, scratch.blk_next, scratch.held_by
    head[:count] = -1
    for block in range(len(step.blk_ns) - 1, -1, -1):
        place = place_of[block] if timed else 0
        for k in range(in_ptr[block], in_ptr[block + 1]):
            place = max(place, first_at[last_write[in_idx[k]]])
            held_by[in_idx[k]] = -1
        for k in range(after_ptr[block], after_ptr[block + 1]):
            place = max(place, again_at[after_idx[k]])
        place_of[block] = place
        link[block] = head[place]
        head[place] = block
    for block in range(len(step.blk_ns)):
        for k in range(in_ptr[block], in_ptr[block + 1]):
            holder = held_by[in_idx[k]]
            if holder < 0 or place_of[block] >= place_of[holder]:
                held_by[in_idx[k]] = block


@part
def _swap_gaps(step: NodeStep, flags: Int8s, scratch: WorkingArrays, count: int) -> None:
    """Compute start times, unless known, and the longest gap of every storage that the plan swaps."""
    timed = scratch.result[TIMED] != 0
    (in_ptr, in_idx), (out_ptr, out_idx) = step.inputs, step.outputs
    ns, blk_ns, swappable = step.ns, step.blk_ns, step.swappable
    start_ns, gap_ns, gap_from, gap_to = scratch.start_ns, scratch.gap_ns, scratch.gap_from, scratch.gap_to
    touched, event, blk_head, blk_next = scratch.touched, scratch.event, scratch.blk_head, scratch.blk_next
    gap_ns[:] = 0
    now = 0
    for at in range(count):
        now = start_ns[at] if timed else now
        start_ns[at] = now
        node = event[at] >> 1
        again = event[at] & 1
        for k in range(in_ptr[node], in_ptr[node + 1]):
            storage = in_idx[k]
            if flags[storage] == SWAP and swappable[storage]:
                before = touched[storage]
                idle = now - start_ns[before] - ns[event[before] & 1, event[before] >> 1]
                if idle > gap_ns[storage]:
                    gap_ns[storage] = idle
                    gap_from[storage] = before
                    gap_to[storage] = at
                touched[storage] = at
        if again == 0:
            for k in range(out_ptr[node], out_ptr[node + 1]):
                touched[out_idx[k]] = at
        now += ns[again, node]
        block = blk_head[at]
        while block >= 0:
            now += blk_ns[block]
            block = blk_next[block]
    start_ns[count] = start_ns[count] if timed else now


@part
def _place_stores(step: NodeStep, scratch: WorkingArrays, count: int) -> None:
    """Find the event before which each copy to the host is done, in FIFO order; ``count`` if it cannot end before a
    loop with swaps of its own begins."""
    event, start_ns, xfer_ns, ns = scratch.event, scratch.start_ns, step.xfer_ns, step.ns
    wait_at, copying = scratch.wait_at, scratch.copying
    stores, store_next = scratch.store_head, scratch.store_next
    following = count
    for at in range(count - 1, -1, -1):
        copying[at] = following
        if step.copies[event[at] >> 1]:
            following = at
    free_ns = 0
    place = 0
    for at in range(count):
        storage = stores[at]
        while storage >= 0:
            end_ns = max(free_ns, start_ns[at] + ns[event[at] & 1, event[at] >> 1]) + xfer_ns[storage]
            if copying[at] < count and end_ns > start_ns[copying[at]]:
                wait_at[storage] = count
            else:
                free_ns = end_ns
                place = max(place, at + 1)
                while place < count and start_ns[place] < free_ns:
                    place += 1
                wait_at[storage] = place
            storage = store_next[storage]


@part
def _place_loads(step: NodeStep, scratch: WorkingArrays, count: int) -> None:
    """Find the event before which each copy from the host starts, from last to first; none if the storage has not left
    the device by then."""
    event, start_ns, xfer_ns = scratch.event, scratch.start_ns, step.xfer_ns
    wait_at, load_at, waits, wait_next = scratch.wait_at, scratch.load_at, scratch.wait_head, scratch.wait_next
    loads, load_next = scratch.load_head, scratch.load_next
    free_ns = start_ns[count]
    latest = count
    for at in range(count - 1, -1, -1):
        storage = waits[at]
        while storage >= 0:
            begin_ns = min(free_ns, start_ns[at]) - xfer_ns[storage]
            place = min(latest, at)
            while place > wait_at[storage]:
                if place < at and step.copies[event[place] >> 1]:  # before the copies of the loop, not at the same time
                    begin_ns = min(begin_ns, start_ns[place] - xfer_ns[storage])
                if start_ns[place] <= begin_ns:
                    break
                place -= 1
            if place > wait_at[storage]:
                latest = place
                free_ns = begin_ns
                load_at[storage] = place
                load_next[storage] = loads[place]  # earlier deadlines come first in the list
                loads[place] = storage
            storage = wait_next[storage]


@part
def _place_swaps(step: NodeStep, flags: Int8s, scratch: WorkingArrays, count: int) -> None:
    """Pass 3: place the events at which swapped storages leave the device and return.

    Stores run in FIFO order from the event that opens the gap; the wait is placed where the copy is done, so it takes
    no time. Loads are scheduled backwards from the event that closes the gap. A storage that would return before its
    memory is freed is kept instead. So no operator waits for a copy. Copies outside a loop that swaps end before the
    loop, or start after it, since copies inside ignore those outside.
    """
    _swap_gaps(step, flags, scratch, count)
    gap_ns, gap_from, gap_to = scratch.gap_ns, scratch.gap_from, scratch.gap_to
    wait_at, load_at = scratch.wait_at, scratch.load_at
    stores, store_next = scratch.store_head, scratch.store_next
    waits, wait_next = scratch.wait_head, scratch.wait_next
    loads = scratch.load_head
    stores[:count] = -1
    waits[:count] = -1
    loads[:count] = -1
    for storage in range(len(flags) - 1, -1, -1):
        wait_at[storage] = -1
        load_at[storage] = -1
        if flags[storage] == SWAP and step.swappable[storage] and gap_ns[storage] > 0:
            store_next[storage] = stores[gap_from[storage]]
            stores[gap_from[storage]] = storage
            wait_next[storage] = waits[gap_to[storage]]  # temporarily: storages to load before an event
            waits[gap_to[storage]] = storage
    _place_stores(step, scratch, count)
    _place_loads(step, scratch, count)
    stores[:count] = -1
    waits[:count] = -1
    swaps = 0
    for storage in range(len(flags) - 1, -1, -1):
        if load_at[storage] >= 0:
            store_next[storage] = stores[gap_from[storage]]
            stores[gap_from[storage]] = storage
            wait_next[storage] = waits[wait_at[storage]]
            waits[wait_at[storage]] = storage
            swaps += 1
        else:
            wait_at[storage] = -1
    scratch.result[N_SWAPS] = swaps


@part
def _count_bytes(step: NodeStep, scratch: WorkingArrays, swaps: bool, count: int) -> None:  # noqa: C901 (as _expand)
    """Pass 4: count bytes event by event. LOAD and WAIT are skipped: the event after them is never below them."""
    nbytes, to_end, out_bytes, ws, tensor = step.nbytes, step.to_end, step.out_bytes, step.ws, step.tensor
    (blk_in_ptr, blk_in_idx), (reuse_ptr, reuse_idx) = step.block_inputs, step.reuses
    blk_ws, blk_tensor = step.blk_ws, step.blk_tensor
    blk_late_ws, blk_late_tensor = step.blk_late_ws, step.blk_late_tensor
    event, last_use, redo_at, free = scratch.event, scratch.last_use, scratch.redo_at, scratch.free
    held_by, blk_place = scratch.held_by, scratch.blk_place
    blk_head, blk_next = scratch.blk_head, scratch.blk_next
    waits, wait_next = scratch.wait_head, scratch.wait_next
    loads, load_next = scratch.load_head, scratch.load_next
    levels, reuse = scratch.level, scratch.reuse
    storages = len(nbytes)
    for storage in range(storages):
        if redo_at[storage] >= 0:
            free[last_use[storages + storage]] += nbytes[storage]
        held = held_by[storage] >= 0 and blk_place[held_by[storage]] >= last_use[storage]
        if not (held or to_end[storage]):
            free[last_use[storage]] += nbytes[storage]
    level = 0
    peak = -1
    tensor_peak = -1
    for at in range(count):
        if swaps:
            storage = waits[at]
            while storage >= 0:
                level -= nbytes[storage]
                storage = wait_next[storage]
            storage = loads[at]
            while storage >= 0:
                level += nbytes[storage]
                storage = load_next[storage]
        node = event[at] >> 1
        level += out_bytes[node]
        saved = 0
        for k in range(reuse_ptr[node], reuse_ptr[node + 1]):
            used = reuse_idx[k]
            dies = last_use[used] == at or (redo_at[used] >= 0 and last_use[storages + used] == at) or reuse[at] == used
            held = held_by[used] >= 0 and blk_place[held_by[used]] >= at
            if dies and not held and not to_end[used]:
                reuse[at] = used
                saved = nbytes[used]
                break
        worst = level - saved + ws[event[at] & 1, node]
        if worst > peak:
            peak = worst
            scratch.result[PEAK_EVENT] = at
        tensor_peak = max(tensor_peak, level - saved + tensor[event[at] & 1, node])
        level -= free[at]
        free[at] = 0
        block = blk_head[at]
        while block >= 0:
            highest = level + blk_ws[block]
            tensor_peak = max(tensor_peak, level + blk_tensor[block])
            for k in range(blk_in_ptr[block], blk_in_ptr[block + 1]):
                used = blk_in_idx[k]
                if held_by[used] == block and last_use[used] <= at and not to_end[used]:
                    level -= nbytes[used]
            highest = max(highest, level + blk_late_ws[block])
            tensor_peak = max(tensor_peak, level + blk_late_tensor[block])
            if highest > peak:
                peak = highest
                scratch.result[PEAK_EVENT] = at
            worst = max(worst, highest)
            block = blk_next[block]
        levels[at] = worst
    scratch.result[PEAK] = peak
    scratch.result[TENSOR_PEAK] = tensor_peak


@part
def _finish(step: NodeStep, flags: Int8s, scratch: WorkingArrays, swaps: bool) -> None:
    """Run passes 2 to 4; with ``TIMED``, start times and block places are known."""
    count = scratch.result[N_EVENTS]
    _place_blocks(step, scratch, count)
    scratch.result[N_SWAPS] = 0
    if swaps:
        _place_swaps(step, flags, scratch, count)
    _count_bytes(step, scratch, swaps, count)


@numba.njit(cache=True)
def run_plan(step: NodeStep, order: Int32s, gaps: Gaps, flags: Int8s, scratch: WorkingArrays) -> bool:
    """Evaluate a plan of a device without a host link; return False if there is no room for REPEAT copies."""
    _set_until(step, gaps, flags, scratch)
    if scratch.result[N_BETWEEN] > len(scratch.between):
        return False
    _place_blocks(step, scratch, _expand(step, order, scratch))
    scratch.result[N_SWAPS] = 0
    _count_bytes(step, scratch, False, scratch.result[N_EVENTS])
    return True


@numba.njit(cache=True)
def run_linked_plan(step: NodeStep, order: Int32s, gaps: Gaps, flags: Int8s, scratch: WorkingArrays) -> bool:
    """Do what ``run_plan`` does for a device with a host link."""
    swaps = _set_until(step, gaps, flags, scratch)
    if scratch.result[N_BETWEEN] > len(scratch.between):
        return False
    _expand(step, order, scratch)
    _finish(step, flags, scratch, swaps)
    return True


@numba.njit(cache=True)
def begin_plan(step: NodeStep, order: Int32s, gaps: Gaps, flags: Int8s, scratch: WorkingArrays) -> int:
    """Run pass 1 of a plan with collectives; return the number of events, -1 without room for REPEAT copies."""
    _set_until(step, gaps, flags, scratch)
    return -1 if scratch.result[N_BETWEEN] > len(scratch.between) else _expand(step, order, scratch)


@numba.njit(cache=True)
def finish_plan(step: NodeStep, flags: Int8s, scratch: WorkingArrays, swaps: bool) -> None:
    """Run the other passes of a plan with overlapped collectives."""
    _finish(step, flags, scratch, swaps)
