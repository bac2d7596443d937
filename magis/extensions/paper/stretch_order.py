"""Best order of a stretch of nodes, by dynamic programming over the sets of nodes already run (paper).

The tensors alive after a set of nodes do not depend on the order of the set, so only the order with the lowest peak is
kept for each set. Bytes are exactly those of ``simulate.kernel`` for a plan without recomputation: in-place reuse,
workspaces, and update blocks that run as early as possible. Sets are enumerated layer by layer, by size; a layer larger
than ``most`` keeps its best sets, so small stretches are ordered optimally and others heuristically.

Two rules keep layers small without loss: no peak is below the largest unavoidable working set, so lower differences are
ignored; and a node that can run within the peak so far and leaves no more bytes in memory than before runs immediately.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from magis.simulate.problem import Int64s, Rows

WIDEST = 60
"""Maximum number of nodes in a stretch, whose sets are one machine word."""
FAR = 1 << 62


class Stretch(NamedTuple):
    """Consecutive nodes, numbered in their order, and all storages alive while they run.

    Sets of nodes are bit masks. Storages that stay alive and that no node of the stretch uses are left out. Defined
    beside the compiled functions: numba's cache on disk identifies fields by position, and checks the age of this file
    only.
    """

    before: Int64s  # [w] nodes here that must precede it
    out_bytes: Int64s  # [w] that it allocates
    ws: Int64s  # [w] workspace
    kills: Rows  # [w] storages that may die with it
    reuses: Rows  # [w] storages whose memory its output may take over if they die with it
    fires: Rows  # [w] blocks that may run right behind it
    maker: Int64s  # [s] node that makes it; -1: it is there from the beginning
    dies: Int64s  # [s] set of nodes after all of which it is gone; 0: it stays
    held: Int64s  # [s] set of nodes after all of which every block that reads it has run
    nbytes: Int64s  # [s]
    trigger: Int64s  # [b] set of nodes that it waits for
    block_inputs: Rows  # [b] storages that it reads and that may die here
    blk_ws: Int64s  # [b]
    blk_late_ws: Int64s  # [b]


@numba.njit(cache=True)
def _start_bytes(st: Stretch) -> int:
    """Return the bytes in memory before the first node."""
    level = 0
    for storage in range(len(st.nbytes)):
        if st.maker[storage] < 0:
            level += st.nbytes[storage]
    return level


@numba.njit(cache=True)
def _read_later(st: Stretch, after: int, node: int, at: int, storage: int) -> bool:
    """Return True if a later block, triggered by the same node as the block at ``at``, reads the storage."""
    for k in range(at + 1, st.fires.ptr[node + 1]):
        block = st.fires.idx[k]
        if st.trigger[block] & after == st.trigger[block]:
            for j in range(st.block_inputs.ptr[block], st.block_inputs.ptr[block + 1]):
                if st.block_inputs.idx[j] == storage:
                    return True
    return False


@numba.njit(cache=True)
def _run_node(st: Stretch, ran: int, level: int, node: int) -> tuple[int, int]:
    """Run a node and the blocks that it triggers; return the peak, and the bytes in memory afterwards."""
    after = ran | 1 << node
    level += st.out_bytes[node]
    peak = level + st.ws[node]
    for k in range(st.reuses.ptr[node], st.reuses.ptr[node + 1]):
        storage = st.reuses.idx[k]
        if st.dies[storage] & after == st.dies[storage] and st.held[storage] & ran == st.held[storage]:
            peak -= st.nbytes[storage]
            break
    for k in range(st.kills.ptr[node], st.kills.ptr[node + 1]):
        storage = st.kills.idx[k]
        if st.dies[storage] & after == st.dies[storage] and st.held[storage] & ran == st.held[storage]:
            level -= st.nbytes[storage]
    for k in range(st.fires.ptr[node], st.fires.ptr[node + 1]):
        block = st.fires.idx[k]
        if st.trigger[block] & after != st.trigger[block]:
            continue
        peak = max(peak, level + st.blk_ws[block])
        for j in range(st.block_inputs.ptr[block], st.block_inputs.ptr[block + 1]):
            storage = st.block_inputs.idx[j]
            if st.dies[storage] & after == st.dies[storage] and not _read_later(st, after, node, k, storage):
                level -= st.nbytes[storage]
        peak = max(peak, level + st.blk_late_ws[block])
    return peak, level


@numba.njit(cache=True)
def peak_of(st: Stretch, order: Int64s) -> int:
    """Return the peak bytes while the nodes run in this order."""
    ran = int(np.int64(0))  # no literal (see ``magis.simulate.kernel``)
    level = _start_bytes(st)
    worst = 0
    for node in order:
        peak, level = _run_node(st, ran, level, node)
        worst = max(worst, peak)
        ran |= 1 << node
    return worst


@numba.njit(cache=True)
def floor_of(st: Stretch) -> int:
    """Return the peak bytes that no order avoids: at some node, those made by ancestors and used by descendants."""
    width = len(st.before)
    above = np.zeros(width, dtype=np.int64)
    below = np.zeros(width, dtype=np.int64)
    for node in range(width):
        above[node] = 1 << node
        for other in range(node):
            if st.before[node] >> other & 1:
                above[node] |= above[other]
    for node in range(width):
        for other in range(width):
            if above[other] >> node & 1:
                below[node] |= 1 << other
    floor = 0
    for node in range(width):
        level = st.ws[node]
        for storage in range(len(st.nbytes)):
            made = st.maker[storage] < 0 or above[node] >> st.maker[storage] & 1
            if made and (st.dies[storage] == 0 or st.dies[storage] & below[node]):
                level += st.nbytes[storage]
        if st.reuses.ptr[node] < st.reuses.ptr[node + 1]:
            level -= st.nbytes[st.reuses.idx[st.reuses.ptr[node]]]  # all are as large as what it makes
        floor = max(floor, level)
    return floor


@numba.njit(cache=True)
def _at_once(st: Stretch, ran: int, level: int, worst: int) -> int:
    """Return a node that can run now without a higher peak and without more bytes afterwards; -1: none."""
    for node in range(len(st.before)):
        if ran >> node & 1 or st.before[node] & ran != st.before[node]:
            continue
        waits = False  # a block that would wait for others may rather want to run behind this node
        for k in range(st.fires.ptr[node], st.fires.ptr[node + 1]):
            trigger = st.trigger[st.fires.idx[k]]
            waits |= trigger & (ran | 1 << node) != trigger
        if not waits:
            peak, left = _run_node(st, ran, level, node)
            if peak <= worst and left <= level:
                return node
    return -1


@numba.njit(cache=True)
def best_order(st: Stretch, most: int) -> Int64s:  # noqa: C901 (compiled: one layer in place of the other)
    """Return the order with the lowest peak; the old order if no lower peak is found with ``most`` sets per layer."""
    width = len(st.before)
    same = np.arange(width)
    bound = peak_of(st, same)
    floor = floor_of(st)
    if bound <= floor:
        return same
    room = 4 * most
    ran = np.zeros(1, dtype=np.int64)
    level = np.full(1, _start_bytes(st), dtype=np.int64)
    worst = np.full(1, floor, dtype=np.int64)
    parent = np.zeros(1024, dtype=np.int32)  # of all states kept so far, layer behind layer
    choice = np.zeros(1024, dtype=np.int32)
    first, total = 0, 1  # of the layer
    for _ in range(width):
        space = min(room, len(ran) * width)
        table = np.full(2 * space + 1, -1, dtype=np.int64)
        new_ran = np.empty(space, dtype=np.int64)
        new_level = np.empty(space, dtype=np.int64)
        new_worst = np.empty(space, dtype=np.int64)
        new_parent = np.empty(space, dtype=np.int32)
        new_choice = np.empty(space, dtype=np.int32)
        count = 0
        for state in range(len(ran)):
            only = _at_once(st, ran[state], level[state], worst[state])
            for node in range(width):
                if only >= 0 and node != only:
                    continue
                if ran[state] >> node & 1 or st.before[node] & ran[state] != st.before[node]:
                    continue
                peak, left = _run_node(st, ran[state], level[state], node)
                peak = max(peak, worst[state])
                if peak >= bound:
                    continue
                child = ran[state] | 1 << node
                slot = child % len(table)
                while table[slot] >= 0 and new_ran[table[slot]] != child:
                    slot = (slot + 1) % len(table)
                at = table[slot]
                if at < 0:
                    if count == space:
                        continue
                    at = count
                    count += 1
                    table[slot] = at
                elif new_worst[at] <= peak:
                    continue
                new_ran[at], new_level[at], new_worst[at] = child, left, peak
                new_parent[at], new_choice[at] = first + state, node
        if count == 0:
            return same
        kept = np.arange(count)
        if count > most:
            kept = np.argsort(new_level[:count], kind="mergesort")
            kept = kept[np.argsort(new_worst[:count][kept], kind="mergesort")][:most]
        ran, level, worst = new_ran[kept], new_level[kept], new_worst[kept]
        while total + len(kept) > len(parent):
            parent = np.concatenate((parent, parent))
            choice = np.concatenate((choice, choice))
        parent[total : total + len(kept)] = new_parent[kept]
        choice[total : total + len(kept)] = new_choice[kept]
        first, total = total, total + len(kept)
    order = np.empty(width, dtype=np.int64)
    state = first
    for place in range(width - 1, -1, -1):  # the last layer has one state: all nodes
        order[place] = choice[state]
        state = parent[state]
    return order
