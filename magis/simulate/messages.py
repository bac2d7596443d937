"""Arrays of the compiled passes in ``message_passes``, for collectives and send/recv between ranks (messages).

Whoever reorders fields here must touch ``message_passes`` as well (numba's on-disk cache, see ``arrays``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from magis.simulate.arrays import WorkingArrays
from magis.simulate.problem import Bools, Int32s, Int64s, Problem, Rows, rows_of


class MessageStep(NamedTuple):
    """Overlapped collectives of a problem; arrays by node are 0, -1 or False for other nodes."""

    ns: Int64s  # [n] time on the communication stream
    at_once: Bools  # [n] blocking collectives, which start when the communication stream is free
    takes: Int32s  # [n] temporary storage that is the input; -1: a persistent input
    gives: Int32s  # [n] output storage
    movable: Bools  # [n] can be prefetched, together with the early nodes that make its input
    early: Bools  # [n] early nodes, see ``Problem``
    late: Int64s  # [n] bytes of the output and of the blocks that read it, at least 1; 0: no block reads it
    blocks: Rows  # [n] blocks that read the output, or overwrite the input
    taken: Bools  # [s] input of a collective
    ceiling: int  # bytes of temporary storages up to which overlap may raise the plan's own peak


class MessageArrays(NamedTuple):
    """Working memory for collectives, in addition to the evaluator's."""

    free: Int64s  # [capacity] copies of the evaluator's free and reuse after pass 1
    reuse: Int32s  # [capacity]
    event: Int32s  # [capacity] the events before they are moved
    level: Int64s  # [capacity] bytes at each event, with extended lifetimes so far
    reader: Int32s  # [capacity] first event that reads the output; -1: none
    is_reader: Bools  # [capacity] True for the first reader of a movable collective
    moved: Int32s  # [capacity] new index of an event
    bundle: Int32s  # [messages, 3] first and last event of a bundle, and the event before which it is moved
    mark: Int32s  # [s] event of the collective whose bundle touches the storage
    pending: Int32s  # [s] event of the collective whose output this is; -1: none is pending
    end_ns: Int64s  # [capacity] end of a collective
    wait_at: Int32s  # [capacity] event after which a collective is waited for; -1: not a collective
    queue: Int32s  # [capacity] pending collectives
    left: Int32s  # [b] collectives for which a block still waits
    due_head: Int32s  # [capacity] linked lists of the blocks after an event
    due_next: Int32s  # [b]


def messages_of(problem: Problem) -> MessageStep | None:
    """Return the overlapped collectives of a problem; None if there are none."""
    return _messages(problem) if problem.message_ns.any() else None


@lru_cache(maxsize=8)
def _messages(problem: Problem) -> MessageStep:
    sent = np.flatnonzero(problem.message_ns).tolist()
    takes, gives = (np.full(problem.n_nodes, -1, dtype=np.int32) for _ in range(2))
    late, movable = np.zeros((2, problem.n_nodes), dtype=np.int64)
    waits: list[list[int]] = [[] for _ in range(problem.n_nodes)]
    in_blocks = problem.block_inputs.turned(problem.n_storages)
    needs = np.maximum(problem.blk_ws, problem.blk_late_ws)
    writers: list[list[int]] = [[] for _ in range(problem.n_written)]  # blocks, per persistent storage
    for block in range(problem.n_blocks):
        for storage in problem.block_writes(block).tolist():
            writers[storage].append(block)
    for node in sent:
        takes[node] = int(problem.inputs(node)[0]) if len(problem.inputs(node)) else -1
        gives[node] = made = int(problem.outputs(node)[0])
        hangs_on = takes[node] >= 0 and not problem.early[problem.producer[takes[node]]]
        movable[node] = not (len(problem.extras(node)) or hangs_on)
        blocks = in_blocks(made).tolist()
        overwriting = {block for storage in problem.preads(node).tolist() for block in writers[storage]}
        waits[node] = [*blocks, *sorted(overwriting)]
        if blocks:
            # other inputs of the blocks also stay in memory
            read = np.unique(np.concatenate([problem.block_inputs(block) for block in blocks]))
            late[node] = max(1, int(problem.nbytes[read].sum()) + int(needs[blocks].max()))
    taken = np.zeros(problem.n_storages, dtype=np.bool_)
    taken[takes[takes >= 0]] = True
    return MessageStep(
        problem.message_ns, problem.at_once, takes, gives, movable.astype(np.bool_), problem.early, late,
        rows_of(waits), taken, problem.ceiling - problem.persistent_bytes,
    )  # fmt: skip


def make_message_arrays(scratch: WorkingArrays) -> MessageArrays:
    """Allocate working memory for any plan that fits the evaluator's working memory."""
    capacity, storages, blocks = len(scratch.event), len(scratch.until), len(scratch.blk_place)

    def i32(*shape: int) -> Int32s:
        return np.full(shape, -1, dtype=np.int32)

    def i64(size: int) -> Int64s:
        return np.zeros(size, dtype=np.int64)

    return MessageArrays(
        free=i64(capacity),
        reuse=i32(capacity),
        event=i32(capacity),
        level=i64(capacity),
        reader=i32(capacity),
        is_reader=np.zeros(capacity, dtype=np.bool_),
        moved=i32(capacity),
        bundle=i32(capacity, 3),
        mark=i32(storages),
        pending=i32(storages),
        end_ns=i64(capacity),
        wait_at=i32(capacity),
        queue=i32(capacity),
        left=i32(blocks),
        due_head=i32(capacity),
        due_next=i32(blocks),
    )
