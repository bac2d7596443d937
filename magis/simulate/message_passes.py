"""The compiled passes for collectives (messages), which run on their own stream and overlap the nodes.

A collective starts once the nodes before it are done and the stream is free. Its first reader and the end of the step
wait for it. Until the wait, its input and output are in memory. A blocking collective also starts when the stream is
free. The plan contains the collectives; these passes decide when they start and where they are waited for:

1. A collective that can start earlier is moved there, with the early nodes that make its input (an all-gather of
weights with the call that concatenates shards): as late as it can still be done in time, and after the first reader of
the previous one, so that at most one is prefetched. 2. A collective is waited for after the first event by which it is
done, at the latest before its first reader, or where its memory is needed. Update blocks that read its output, or
overwrite its input, run after the wait.

Extended lifetimes stay within the plan's own peak with blocking collectives, or within the problem's ceiling. Side
effects of the moves, such as another output that runs in place, can still need more (8 of 100,000 random plans): such a
plan then runs all collectives blocking. So without swaps, which are placed by time, overlap never raises the peak above
both.

This file calls no compiled function of another file, since numba's on-disk cache would not notice changes there.
"""

from __future__ import annotations

import numba

from magis.simulate.arrays import NodeStep, WorkingArrays, part
from magis.simulate.messages import MessageArrays, MessageStep

# Slots of the result array, as in ``kernel``.
LATENCY, N_EVENTS, N_BETWEEN = 2, 4, 7
AHEAD = 1.25
"""Multiple of its own time by which a collective is prefetched, if possible."""


@numba.njit(cache=True)
def remember(scratch: WorkingArrays, own: MessageArrays) -> None:
    """Save the arrays that counting bytes overwrites."""
    count = scratch.result[N_EVENTS]
    own.free[:count] = scratch.free[:count]
    own.reuse[:count] = scratch.reuse[:count]


@numba.njit(cache=True)
def place_messages(step: NodeStep, plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, highest: int) -> None:
    """Order the events, compute their times, and place the waits for collectives and the blocks.

    ``scratch`` has the plan with blocking collectives, with its bytes counted; the caller then counts them again.
    Extended lifetimes stay below ``highest`` bytes; 0 makes all collectives blocking.
    """
    count = scratch.result[N_EVENTS]
    own.level[:count] = scratch.level[:count]
    _first_readers(step, plan, scratch, own, count)
    moves = _find_moves(step, plan, scratch, own, count, highest)
    _move(step, scratch, own, count, moves)
    _first_readers(step, plan, scratch, own, count)
    _list_blocks(step, plan, scratch, own, count)
    _time_events(step, plan, scratch, own, count, highest)
    _lengthen(step, plan, scratch, own)


@part
def _first_readers(step: NodeStep, plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, count: int) -> None:
    """Find the first reader of each collective's output."""
    in_ptr, in_idx = step.inputs
    event, reader, is_reader, pending = scratch.event, own.reader, own.is_reader, own.pending
    pending[:] = -1
    is_reader[:count] = False
    reader[:count] = -1
    for at in range(count):
        node = event[at] >> 1
        for k in range(in_ptr[node], in_ptr[node + 1]):
            sender = pending[in_idx[k]]
            if sender >= 0:
                reader[sender] = at
                is_reader[at] = is_reader[at] or plan.movable[event[sender] >> 1]
                pending[in_idx[k]] = -1
        if plan.ns[node] > 0:
            pending[plan.gives[node]] = at


@part
def _touches(step: NodeStep, own: MessageArrays, node: int, mark: int) -> bool:
    """Return True if a node reads or makes a storage with the given mark."""
    (in_ptr, in_idx), (out_ptr, out_idx) = step.inputs, step.outputs
    found = False
    for k in range(in_ptr[node], in_ptr[node + 1]):
        found = found or own.mark[in_idx[k]] == mark
    for k in range(out_ptr[node], out_ptr[node + 1]):
        found = found or own.mark[out_idx[k]] == mark
    return found


@part
def _bundle(step: NodeStep, plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, at: int) -> int:
    """Mark the storages of a collective and of the early events right before it that make its input; return the first
    of these events."""
    (in_ptr, in_idx), (out_ptr, out_idx) = step.inputs, step.outputs
    first = at
    while True:
        node = scratch.event[first] >> 1
        for k in range(in_ptr[node], in_ptr[node + 1]):
            own.mark[in_idx[k]] = at
        for k in range(out_ptr[node], out_ptr[node + 1]):
            own.mark[out_idx[k]] = at
        if first == 0:
            return first
        before = scratch.event[first - 1] >> 1
        if not plan.early[before] or own.is_reader[first - 1] or not _touches(step, own, before, at):
            return first
        first -= 1


@part
def _find_moves(
    step: NodeStep, plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, count: int, highest: int
) -> int:
    """Find bundles of events to move earlier, from last to first; return their number."""
    event, start_ns, ns, level, bundle = scratch.event, scratch.start_ns, step.ns, own.level, own.bundle
    now = 0
    for at in range(count):
        start_ns[at] = now
        now += ns[event[at] & 1, event[at] >> 1]
    own.mark[:] = -1
    free_ns = now
    moves = 0
    for at in range(count - 1, -1, -1):
        node = event[at] >> 1
        if not plan.movable[node] or own.reader[at] < 0:
            continue
        first = _bundle(step, plan, scratch, own, at)
        nbytes = scratch_bytes = 0
        for member in range(first, at + 1):
            nbytes += step.out_bytes[event[member] >> 1]
            scratch_bytes = max(scratch_bytes, step.ws[event[member] & 1, event[member] >> 1])
        free_ns = min(free_ns, start_ns[own.reader[at]]) - int(AHEAD * plan.ns[node])
        place = first
        while place > 0 and start_ns[place] > free_ns:
            before = place - 1
            if own.is_reader[before] or plan.movable[event[before] >> 1]:
                break
            if level[before] + nbytes + scratch_bytes > highest or _touches(step, own, event[before] >> 1, at):
                break
            place = before
        if place < first:
            for passed in range(place, first):
                level[passed] += nbytes
            bundle[moves, 0] = first
            bundle[moves, 1] = at
            bundle[moves, 2] = place
            moves += 1
    return moves


@part
def _move(step: NodeStep, scratch: WorkingArrays, own: MessageArrays, count: int, moves: int) -> None:
    """Apply the moves to the order of events, and renumber all references to events."""
    event, level, moved, bundle = scratch.event, scratch.level, own.moved, own.bundle
    own.event[:count] = event[:count]
    level[:count] = own.level[:count]
    moved[:count] = -1
    place = 0
    for at in range(count):
        while moves > 0 and bundle[moves - 1, 2] == at:
            moves -= 1
            for member in range(bundle[moves, 0], bundle[moves, 1] + 1):
                level[member] = own.level[at]
                moved[member] = place
                place += 1
        if moved[at] < 0:
            moved[at] = place
            place += 1
    for at in range(count):
        event[moved[at]] = own.event[at]
        own.level[moved[at]] = level[at]
        scratch.free[moved[at]] = own.free[at]
        scratch.reuse[moved[at]] = own.reuse[at]
    storages = len(step.nbytes)
    for node in range(len(scratch.first_at)):
        scratch.first_at[node] = moved[scratch.first_at[node]]
        scratch.again_at[node] = moved[scratch.again_at[node]]
    for storage in range(storages):
        scratch.last_use[storage] = moved[scratch.last_use[storage]]
        if scratch.redo_at[storage] >= 0:
            scratch.redo_at[storage] = moved[scratch.redo_at[storage]]
            scratch.last_use[storages + storage] = moved[scratch.last_use[storages + storage]]
    for k in range(scratch.result[N_BETWEEN]):
        scratch.between[k, 1] = moved[scratch.between[k, 1]]
        scratch.between[k, 2] = moved[scratch.between[k, 2]]


@part
def _list_blocks(step: NodeStep, plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, count: int) -> None:
    """Find the earliest event after which each block may run, as far as nodes decide, and count the collectives that
    the block waits for."""
    (in_ptr, in_idx), (after_ptr, after_idx) = step.block_inputs, step.block_after
    own.due_head[:count] = -1
    for block in range(len(step.blk_ns)):
        place = left = 0
        for k in range(in_ptr[block], in_ptr[block + 1]):
            writer = step.last_write[in_idx[k]]
            place = max(place, scratch.first_at[writer])
            left += plan.ns[writer] > 0
        for k in range(after_ptr[block], after_ptr[block + 1]):
            place = max(place, scratch.again_at[after_idx[k]])
            left += plan.ns[after_idx[k]] > 0
        scratch.blk_place[block] = place
        own.left[block] = left
        if left == 0:
            own.due_next[block] = own.due_head[place]
            own.due_head[place] = block


@part
def _holds_up(plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, at: int, node: int) -> bool:
    """Return True if a block waits only to overwrite the input of a collective."""
    ptr, idx = plan.blocks
    found = False
    for k in range(ptr[node], ptr[node + 1]):
        found = found or (own.left[idx[k]] == 1 and scratch.blk_place[idx[k]] <= at)
    return found and plan.late[node] == 0


@part
def _is_over(
    plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, at: int, sent: int, now: int, count: int,
    nbytes: int, highest: int,
) -> bool:  # fmt: skip
    """Return True if a collective is to be waited for after an event: it is done, or its result or memory is needed."""
    node = scratch.event[sent] >> 1
    last = own.reader[sent] - 1
    if own.reader[sent] < 0:
        last = count - 1 if plan.late[node] > 0 else sent
    if at >= last or own.end_ns[sent] <= now or _holds_up(plan, scratch, own, at, node):
        return True
    return own.level[at + 1] + nbytes > highest  # type: ignore[no-any-return]


@part
def _release(plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, at: int, sent: int) -> None:
    """Unblock the update blocks that waited for the last run of a collective."""
    node = scratch.event[sent] >> 1
    ptr, idx = plan.blocks
    if scratch.again_at[node] != sent:
        return
    for k in range(ptr[node], ptr[node + 1]):
        block = idx[k]
        own.left[block] -= 1
        if own.left[block] == 0:
            place = max(scratch.blk_place[block], at)
            own.due_next[block] = own.due_head[place]
            own.due_head[place] = block


@part
def _time_events(
    step: NodeStep, plan: MessageStep, scratch: WorkingArrays, own: MessageArrays, count: int, highest: int
) -> None:
    """Compute times on both streams; place the waits for collectives and the blocks."""
    event, start_ns, ns, nbytes, queue = scratch.event, scratch.start_ns, step.ns, step.nbytes, own.queue
    own.wait_at[:count] = -1
    now = stream_ns = waiting = 0
    for at in range(count):
        node = event[at] >> 1
        if plan.at_once[node]:
            now = max(now, stream_ns)
        start_ns[at] = now
        now += ns[event[at] & 1, node]
        if plan.at_once[node]:
            stream_ns = now
        if plan.ns[node] > 0:
            stream_ns = max(stream_ns, now) + plan.ns[node]
            own.end_ns[at] = stream_ns
            queue[waiting] = at
            waiting += 1
        kept = 0
        for k in range(waiting):
            sent = queue[k]
            sender = event[sent] >> 1
            stays = plan.late[sender]
            if plan.takes[sender] >= 0:
                stays += nbytes[plan.takes[sender]]
            if _is_over(plan, scratch, own, at, sent, now, count, stays, highest):
                now = max(now, own.end_ns[sent])
                own.wait_at[sent] = at
                _release(plan, scratch, own, at, sent)
            else:
                own.level[at + 1] += stays
                queue[kept] = sent
                kept += 1
        waiting = kept
        block = own.due_head[at]
        while block >= 0:
            scratch.blk_place[block] = at
            now += step.blk_ns[block]
            block = own.due_next[block]
    start_ns[count] = now
    scratch.result[LATENCY] = now


@part
def _lengthen(step: NodeStep, plan: MessageStep, scratch: WorkingArrays, own: MessageArrays) -> None:
    """Extend the lifetimes of collectives' inputs until the wait."""
    last_use, wait_at, storages = scratch.last_use, own.wait_at, len(step.nbytes)
    for storage in range(storages):
        if plan.taken[storage]:
            last_use[storage] = max(last_use[storage], wait_at[last_use[storage]])
            if scratch.redo_at[storage] >= 0:
                again = last_use[storages + storage]
                last_use[storages + storage] = max(again, wait_at[again])
    for k in range(scratch.result[N_BETWEEN]):
        storage = scratch.between[k, 0]
        if plan.taken[storage]:
            used_at = scratch.between[k, 2]
            until = max(used_at, wait_at[used_at])
            scratch.free[used_at] -= step.nbytes[storage]
            scratch.free[until] += step.nbytes[storage]
            scratch.between[k, 2] = until
