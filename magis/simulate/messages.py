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

    ns: Int64s  # [n] on the stream of messages
    at_once: Bools  # [n] messages that take time of the nodes, and begin when the stream is free
    takes: Int32s  # [n] temporary storage that is sent, -1: what is sent persists
    gives: Int32s  # [n] storage that arrives
    movable: Bools  # [n] may be sent much earlier than it stands, with the early nodes that make what it takes
    early: Bools  # [n] see ``Problem``: these nodes
    late: Int64s  # [n] where blocks read what arrives: the bytes of that and what the blocks need, at least 1
    blocks: Rows  # [n] blocks that wait for the message, which they read or whose input they overwrite
    taken: Bools  # [s] some message takes it
    ceiling: int  # bytes of temporary storages up to which messages may be given room; at least the plan's own peak


class MessageArrays(NamedTuple):
    """Working memory for collectives, in addition to the evaluator's."""

    free: Int64s  # [capacity] the same two as the events were expanded
    reuse: Int32s  # [capacity]
    event: Int32s  # [capacity] the events in their former order
    level: Int64s  # [capacity] bytes at each event as far as they are given out
    reader: Int32s  # [capacity] first event that reads what arrives, -1: none does
    is_reader: Bools  # [capacity] whether it is that of a movable message
    moved: Int32s  # [capacity] new place of an event
    bundle: Int32s  # [messages, 3] first and last event of what moves together, the event that it comes before
    mark: Int32s  # [s] the message, by its event, whose bundle reads or makes the storage
    pending: Int32s  # [s] the event that sent what arrives there, -1: nothing is under way
    end_ns: Int64s  # [capacity] when a message is over
    wait_at: Int32s  # [capacity] event behind which the message of an event is waited for, -1: it is none
    queue: Int32s  # [capacity] messages under way
    left: Int32s  # [b] messages that a block still waits for
    due_head: Int32s  # [capacity] linked lists of the blocks behind an event
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
    overwrites = _overwriting(problem)
    for node in sent:
        takes[node] = int(problem.inputs(node)[0]) if len(problem.inputs(node)) else -1
        gives[node] = made = int(problem.outputs(node)[0])
        hangs_on = takes[node] >= 0 and not problem.early[problem.producer[takes[node]]]
        movable[node] = not (len(problem.extras(node)) or hangs_on)
        blocks = in_blocks(made).tolist()
        waits[node] = [*blocks, *overwrites[node]]
        if blocks:
            # other inputs of the blocks stay for them, too
            read = np.unique(np.concatenate([problem.block_inputs(block) for block in blocks]))
            late[node] = max(1, int(problem.nbytes[read].sum()) + int(needs[blocks].max()))
    taken = np.zeros(problem.n_storages, dtype=np.bool_)
    taken[takes[takes >= 0]] = True
    return MessageStep(
        problem.message_ns, problem.at_once, takes, gives, movable.astype(np.bool_), problem.early, late,
        rows_of(waits), taken, problem.ceiling - problem.persistent_bytes,
    )  # fmt: skip


def _overwriting(problem: Problem) -> list[list[int]]:
    """List, per node, the blocks that overwrite persistent storages which the node reads."""
    writers: list[list[int]] = [[] for _ in range(problem.n_written)]
    for block in range(problem.n_blocks):
        for storage in problem.block_writes(block).tolist():
            writers[storage].append(block)
    return [
        sorted({block for storage in problem.preads(node).tolist() for block in writers[storage]})
        for node in range(problem.n_nodes)
    ]


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
