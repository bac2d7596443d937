"""Arrays of the evaluator's compiled passes: those of a problem, the gaps of an order, and working memory.

Whoever reorders fields here must touch ``kernel`` as well: numba's on-disk cache knows fields by position, and checks
the age of the compiled function's own file only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np

from magis.simulate.problem import Bools, Int32s, Int64s, Problem, Rows, int64s, rows_of

part = numba.njit(cache=True, inline="always")
"""Compiles a function into those that call it: alone, one that takes so many arrays costs half a second more."""


class NodeStep(NamedTuple):
    """Arrays of a Problem for the compiled passes, and derived ones."""

    inputs: Rows
    outputs: Rows
    out_bytes: Int64s  # [n] of all outputs
    reuses: Rows
    block_inputs: Rows
    block_after: Rows  # [b] nodes after whose last run the block runs: readers of its writes, and nodes that may raise
    ns: Int64s  # [2, n] of the first run, of the recomputation
    ws: Int64s
    tensor: Int64s
    blk_ns: Int64s
    blk_ws: Int64s
    blk_tensor: Int64s
    blk_late_ws: Int64s
    blk_late_tensor: Int64s
    nbytes: Int64s
    xfer_ns: Int64s  # [s] time of one copy to or from the host
    copies: Bools  # [n] a loop whose parts swap: no other host copy runs at that time
    producer: Int32s
    last_write: Int32s
    to_end: Bools
    redoable: Bools  # [s] may be dropped and recomputed
    swappable: Bools  # [s]


class Gaps(NamedTuple):
    """Longest idle interval of each storage in one order, strictly between the positions start and end."""

    start: Int32s  # [s] -1: the storage is never idle
    end: Int32s  # [s]
    last: Int32s  # [s] last touch by a node


class WorkingArrays(NamedTuple):
    """Working memory of one evaluator; after ``run_plan`` it describes the last plan.

    Events here exclude blocks and swaps: a first run is 2 * node, a recomputation 2 * node + 1.
    """

    event: Int32s  # [capacity]
    until: Int32s  # [s] last position of the current copy
    stays_from: Int32s  # [s] first position from which a recomputed copy stays to its last use
    stack: Int32s  # [n, 2] node being recomputed, index of its next input
    first_at: Int32s  # [n] event of the first run
    again_at: Int32s  # [n] event of the last run
    redo_at: Int32s  # [s] event of the last recomputation; -1: none
    last_use: Int32s  # [2 s] last reader of the first, then of the last recomputed copy; its producer if unread
    replaced: Int32s  # [s] number of recomputed copies that were replaced
    between: Int32s  # [(copies - 1) * redoable, 3] replaced copies: storage, producing event, last reader
    free: Int64s  # [capacity] bytes freed after an event; all 0 between two plans
    level: Int64s  # [capacity] peak bytes of an event and the blocks after it
    reuse: Int32s  # [capacity] storage in whose memory the event's output is written, or -1
    blk_place: Int32s  # [b] event after which the block runs
    blk_head: Int32s  # [capacity] linked lists of the blocks after an event
    blk_next: Int32s  # [b]
    held_by: Int32s  # [s] last block that reads the storage; -1: none
    start_ns: Int64s  # [capacity + 1]
    gap_ns: Int64s  # [s] swaps: longest gap,
    gap_from: Int32s  # [s] the event that opens the gap,
    gap_to: Int32s  # [s] the event that closes the gap,
    touched: Int32s  # [s] and the latest touch
    copying: Int32s  # [capacity] the next loop after this event whose parts swap
    wait_at: Int32s  # [s] event before which the copy to the host is waited for; -1: not swapped
    load_at: Int32s  # [s] event before which the storage is loaded
    store_head: Int32s  # [capacity] linked lists of stores after, and waits and loads before an event
    store_next: Int32s  # [s]
    wait_head: Int32s  # [capacity]
    wait_next: Int32s  # [s]
    load_head: Int32s  # [capacity]
    load_next: Int32s  # [s]
    result: Int64s  # [9] see kernel


def make_step(problem: Problem) -> NodeStep:
    """Return the arrays for the compiled passes, derived from a problem."""
    in_block = np.zeros(problem.n_storages, dtype=np.bool_)
    in_block[problem.block_inputs.idx] = True
    # A block may run at any time after its gradient is made, so tensors that blocks read stay in memory.
    stays = problem.pinned | problem.to_end | in_block
    xfer = problem.xfer_ns_per_byte
    sent = np.zeros(problem.n_storages, dtype=np.bool_)
    for node in np.flatnonzero(problem.message_ns).tolist():
        # A host copy would read a tensor before the collective is done, or free the tensor too early.
        sent[[*problem.inputs(node), *problem.outputs(node)]] = True
    # Before a block run the readers of the persistent storages that it writes, and the nodes that it waits for.
    readers: list[list[int]] = [[] for _ in range(problem.n_written)]
    for node in range(problem.n_nodes):
        for persistent in problem.preads(node):
            readers[persistent].append(node)
    before_blocks = [
        sorted(
            {node for persistent in problem.block_writes(block) for node in readers[persistent]}
            | {*problem.block_waits(block).tolist()}
        )
        for block in range(problem.n_blocks)
    ]
    same = {name: getattr(problem, name) for name in NodeStep._fields if hasattr(problem, name)}
    return NodeStep(
        **same,
        out_bytes=int64s(int(problem.nbytes[problem.outputs(node)].sum()) for node in range(problem.n_nodes)),
        block_after=rows_of(before_blocks),
        ns=np.stack([problem.node_ns, problem.redo_ns]),
        ws=np.stack([problem.node_ws, problem.redo_ws]),
        tensor=np.stack([problem.node_tensor, problem.redo_tensor]),
        xfer_ns=int64s(problem.copy_ns + math.ceil(int(size) * xfer) for size in problem.nbytes),
        redoable=~stays & problem.redo_ok[problem.producer],
        swappable=~stays & ~sent & (problem.nbytes > 0) & (xfer > 0.0),
    )


def make_scratch(step: NodeStep, copies: int) -> WorkingArrays:
    """Allocate working memory for any plan of a step with that many recomputed copies of a storage at most."""
    n = step.ns.shape[1]
    s = len(step.nbytes)
    b = len(step.blk_ns)
    redoable = int(np.count_nonzero(step.redoable))
    capacity = n + copies * redoable  # a recomputation makes at least one storage

    def i32(*shape: int) -> Int32s:
        return np.full(shape, -1, dtype=np.int32)

    def i64(size: int) -> Int64s:
        return np.zeros(size, dtype=np.int64)

    return WorkingArrays(
        event=i32(capacity),
        until=i32(s),
        stays_from=i32(s),
        stack=i32(n, 2),
        first_at=i32(n),
        again_at=i32(n),
        redo_at=i32(s),
        last_use=i32(2 * s),
        replaced=i32(s),
        between=i32((copies - 1) * redoable, 3),
        free=i64(capacity),
        level=i64(capacity),
        reuse=i32(capacity),
        blk_place=i32(b),
        blk_head=i32(capacity),
        blk_next=i32(b),
        held_by=i32(s),
        start_ns=i64(capacity + 1),
        gap_ns=i64(s),
        gap_from=i32(s),
        gap_to=i32(s),
        touched=i32(s),
        copying=i32(capacity),
        wait_at=i32(s),
        load_at=i32(s),
        store_head=i32(capacity),
        store_next=i32(s),
        wait_head=i32(capacity),
        wait_next=i32(s),
        load_head=i32(capacity),
        load_next=i32(s),
        result=i64(9),
    )
