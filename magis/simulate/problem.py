"""A training step as compact arrays, and plans as events: the data of evaluator, search and reordering.

``compiled_problem`` turns a Graph into a Problem, `Events` are the schedule of a plan, ``realize`` turns events back
into a Graph. Nodes are the operators that do work (no views), except weight updates: these are *blocks*, which float,
as the evaluator runs each as early as possible. Bytes are rounded as by the device's allocator, times are integer
nanoseconds: every decision is deterministic on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from magis.errors import VerifyError

Int8s = npt.NDArray[np.int8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Rows(NamedTuple):
    """A ragged array in CSR form: row r is idx[ptr[r] : ptr[r + 1]]; calling it with r returns that row."""

    ptr: Int32s
    idx: Int32s

    def __call__(self, row: int) -> Int32s:
        return self.idx[self.ptr[row] : self.ptr[row + 1]]

    def places(self) -> Int32s:
        """Return the row index of every entry."""
        return np.repeat(np.arange(len(self.ptr) - 1, dtype=np.int32), np.diff(self.ptr))

    def turned(self, count: int) -> Rows:
        """Return the transpose, for entries in 0..count-1: its row i lists the rows that contain i."""
        ptr = np.zeros(count + 1, dtype=np.int32)
        ptr[1:] = np.cumsum(np.bincount(self.idx, minlength=count))
        return Rows(ptr, self.places()[np.argsort(self.idx, kind="stable")])


def rows_of(lists: Iterable[Sequence[int]]) -> Rows:
    """Build a ragged array from lists of integers."""
    rows = list(lists)
    ptr = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    return Rows(ptr, np.array([item for row in rows for item in row], dtype=np.int32))


def int64s(values: Iterable[int]) -> Int64s:
    """Return the integers as an int64 array."""
    return np.array([*values], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Problem:
    """A step without a plan.

    Nodes 0..n-1 are in program order, which must be legal. Temporary storages are numbered 0..s-1; persistent storages
    that a block writes have separate numbers 0..p-1; other persistent storages have none.
    """

    # nodes
    inputs: Rows  # [n] temporary storages that the node reads or mutates, each once
    outputs: Rows  # [n] temporary storages that the node, and no other, allocates
    node_ns: Int64s  # [n] time of the operator
    node_ws: Int64s  # [n] peak bytes of the node in addition to inputs and new outputs
    node_tensor: Int64s  # [n] node_ws without operators' workspace: tensors that live within the node only
    redo_ns: Int64s  # [n] node_ns, node_ws and node_tensor of the recompute form
    redo_ws: Int64s
    redo_tensor: Int64s
    redo_ok: Bools  # [n] can be recomputed: writes nothing, reads nothing that a node writes later
    copies: Bools  # [n] a loop whose parts swap: no other host copy runs at that time
    message_ns: Int64s  # [n] time of an overlapped collective on the communication stream; 0: other nodes
    at_once: Bools  # [n] a blocking collective: starts once the overlapped collectives are done
    early: Bools  # [n] reads outputs of early nodes only: may run at any time before its readers
    reuses: Rows  # [n] inputs that die at the node, in whose memory its only output may be written
    preads: Rows  # [n] persistent storages that the node reads and some block writes
    extras: Rows  # [n] earlier nodes that must stay earlier, besides producers of inputs
    # temporary storages
    nbytes: Int64s  # [s] rounded as by the allocator
    producer: Int32s  # [s] node that allocates the storage
    pinned: Bools  # [s] stays in memory from production to last use: mutated, or partly covered by values
    last_write: Int32s  # [s] last node that writes the storage; the producer unless mutated
    to_end: Bools  # [s] alive until the end of the step (the loss)
    # update blocks: all operators of one weight's update, run back to back
    block_inputs: Rows  # [b] temporary storages that the block reads (the gradient)
    block_writes: Rows  # [b] persistent storages that the block writes
    block_waits: Rows  # [b] nodes that must run before the block because they may raise
    blk_ns: Int64s  # [b] time of the block
    blk_ws: Int64s  # [b] peak bytes in addition to the inputs, while the block reads them
    blk_tensor: Int64s  # [b] blk_ws without operators' workspace
    blk_late_ws: Int64s  # [b] blk_ws and blk_tensor afterwards, when dying inputs are freed
    blk_late_tensor: Int64s
    # step
    persistent_bytes: int  # weights, buffers, optimizer state, batch: counted the whole time
    xfer_ns_per_byte: float  # host copies, both directions at once; 0.0: no swaps on this device
    copy_ns: int  # fixed time of a host copy
    ceiling: int = 0  # bytes up to which overlap of collectives may raise the plan's own peak

    @property
    def n_nodes(self) -> int:
        return len(self.node_ns)

    @property
    def n_storages(self) -> int:
        return len(self.nbytes)

    @property
    def n_blocks(self) -> int:
        return len(self.blk_ns)

    @property
    def least_ns(self) -> int:
        """Lower bound of the latency in ns of all plans: every node and block once."""
        return int(self.node_ns.sum() + self.blk_ns.sum())

    @property
    def n_written(self) -> int:
        """Number of persistent storages that blocks write."""
        return 1 + int(max((*self.block_writes.idx, *self.preads.idx), default=-1))


@dataclass(frozen=True)
class NodeRow:
    """One node for ``build_problem``, with the fields of Problem's node arrays."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ns: int
    ws: int = 0
    redo_ns: int = 0
    redo_ws: int = 0
    tensor: int = 0
    redo_tensor: int = 0
    redo_ok: bool = False
    copies: bool = False
    message_ns: int = 0
    at_once: bool = False
    reuse: tuple[int, ...] = ()
    preads: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()


@dataclass(frozen=True)
class StorageRow:
    """One temporary storage for ``build_problem``; ``last_write`` None: only its producer writes it."""

    nbytes: int
    pinned: bool = False
    last_write: int | None = None
    to_end: bool = False


@dataclass(frozen=True)
class BlockRow:
    """One update block for ``build_problem``."""

    inputs: tuple[int, ...]
    writes: tuple[int, ...]
    ns: int
    ws: int = 0
    tensor: int = 0
    late_ws: int = 0
    late_tensor: int = 0
    waits: tuple[int, ...] = ()


def build_problem(
    nodes: Sequence[NodeRow],
    storages: Sequence[StorageRow],
    blocks: Sequence[BlockRow] = (),
    *,
    persistent_bytes: int = 0,
    xfer_ns_per_byte: float = 0.0,
    copy_ns: int = 0,
    ceiling: int = 0,
) -> Problem:
    """Build the arrays of a step from rows. Raises VerifyError for a row that violates an invariant of ``Problem``."""
    producer = [-1] * len(storages)
    for index, node in enumerate(nodes):
        _check_node(index, node, storages, producer)
    last_write = [_last_write(index, row, producer, nodes) for index, row in enumerate(storages)]
    for index, block in enumerate(blocks):
        for tensor, total in ((block.tensor, block.ws), (block.late_tensor, block.late_ws)):
            if not 0 <= tensor <= total or block.ns < 0:
                raise VerifyError(f"block {index}: needs 0 <= tensor bytes {tensor} <= bytes {total}")
        _check_ids(f"block {index}", block.inputs, len(storages))
        _check_ids(f"block {index}", block.waits, len(nodes))
    for index, node in enumerate(nodes):
        if node.message_ns:
            _check_alone(f"node {index}", node, nodes, storages, blocks, producer)
    if blocks and not nodes:
        raise VerifyError("blocks need a node to run behind")
    if persistent_bytes < 0 or not 0.0 <= xfer_ns_per_byte < 1e6 or copy_ns < 0:
        copies = f"{xfer_ns_per_byte} ns per byte or {copy_ns} ns per copy"
        raise VerifyError(f"{persistent_bytes} persistent bytes, {copies}: out of range")
    return Problem(
        inputs=rows_of(node.inputs for node in nodes),
        outputs=rows_of(node.outputs for node in nodes),
        node_ns=int64s(node.ns for node in nodes),
        node_ws=int64s(node.ws for node in nodes),
        node_tensor=int64s(node.tensor for node in nodes),
        redo_ns=int64s(node.redo_ns for node in nodes),
        redo_ws=int64s(node.redo_ws for node in nodes),
        redo_tensor=int64s(node.redo_tensor for node in nodes),
        redo_ok=np.array([node.redo_ok for node in nodes], dtype=np.bool_),
        copies=np.array([node.copies for node in nodes], dtype=np.bool_),
        message_ns=int64s(node.message_ns for node in nodes),
        at_once=np.array([node.at_once for node in nodes], dtype=np.bool_),
        early=np.array(_mark_early(nodes, producer), dtype=np.bool_),
        reuses=rows_of(node.reuse for node in nodes),
        preads=rows_of(node.preads for node in nodes),
        extras=rows_of(node.extra for node in nodes),
        nbytes=int64s(row.nbytes for row in storages),
        producer=np.array(producer, dtype=np.int32),
        pinned=np.array([row.pinned for row in storages], dtype=np.bool_),
        last_write=np.array(last_write, dtype=np.int32),
        to_end=np.array([row.to_end for row in storages], dtype=np.bool_),
        block_inputs=rows_of(block.inputs for block in blocks),
        block_writes=rows_of(block.writes for block in blocks),
        block_waits=rows_of(block.waits for block in blocks),
        blk_ns=int64s(block.ns for block in blocks),
        blk_ws=int64s(block.ws for block in blocks),
        blk_tensor=int64s(block.tensor for block in blocks),
        blk_late_ws=int64s(block.late_ws for block in blocks),
        blk_late_tensor=int64s(block.late_tensor for block in blocks),
        persistent_bytes=persistent_bytes,
        xfer_ns_per_byte=xfer_ns_per_byte,
        copy_ns=copy_ns,
        ceiling=ceiling,
    )


def _mark_early(nodes: Sequence[NodeRow], producer: Sequence[int]) -> list[bool]:
    """Mark nodes that depend on other marked nodes only (no collectives)."""
    found: list[bool] = []
    for node in nodes:
        free = not (node.extra or node.message_ns or node.copies)
        found.append(free and all(found[producer[storage]] for storage in node.inputs))
    return found


def _check_message(what: str, node: NodeRow) -> None:
    """Check that an overlapped collective has at most one temporary input, one output, and no compute time."""
    if node.message_ns < 0:
        raise VerifyError(f"{what}: negative time of a message")
    if not node.message_ns:
        return
    if node.at_once or len(node.inputs) > 1 or len(node.outputs) != 1 or node.reuse or node.ns or node.redo_ns:
        raise VerifyError(f"{what}: a message takes one storage at most, makes one, and takes no time of the nodes")


def _check_alone(
    what: str,
    node: NodeRow,
    nodes: Sequence[NodeRow],
    storages: Sequence[StorageRow],
    blocks: Sequence[BlockRow],
    producer: Sequence[int],
) -> None:
    """Check that only the collective reads its input, and that nothing pins or returns its input and output."""
    for storage in (*node.inputs, *node.outputs):
        if storages[storage].pinned or storages[storage].to_end:
            raise VerifyError(f"{what}: a message takes or makes storage {storage}, which is pinned or needed")
    for storage in node.inputs:
        readers = sum(storage in each.inputs for each in nodes) + sum(storage in each.inputs for each in blocks)
        if readers != 1 or len(nodes[producer[storage]].outputs) != 1:
            raise VerifyError(f"{what}: what a message takes, storage {storage}, is made alone, and for it alone")


def _check_node(index: int, node: NodeRow, storages: Sequence[StorageRow], producer: list[int]) -> None:
    """Check the invariants of one node, and record it as the producer of its outputs."""
    what = f"node {index}"
    _check_message(what, node)
    if min(node.ns, node.ws, node.redo_ns, node.redo_ws) < 0:
        raise VerifyError(f"{what}: negative time or workspace")
    for tensor, total in ((node.tensor, node.ws), (node.redo_tensor, node.redo_ws)):
        if not 0 <= tensor <= total:
            raise VerifyError(f"{what}: needs 0 <= tensor bytes {tensor} <= bytes {total}")
    _check_ids(what, node.inputs, len(storages))
    _check_ids(what, node.outputs, len(storages))
    for storage in node.inputs:
        if producer[storage] < 0:
            raise VerifyError(f"{what}: reads storage {storage} before any node has made it")
    for storage in node.outputs:
        if producer[storage] >= 0:
            raise VerifyError(f"{what}: makes storage {storage}, as node {producer[storage]} does")
        producer[storage] = index
    if node.reuse and len(node.outputs) != 1:
        raise VerifyError(f"{what}: in-place re-use needs exactly one output, not {len(node.outputs)}")
    for storage in node.reuse:
        if storage not in node.inputs or storages[storage].pinned or storages[storage].to_end:
            raise VerifyError(f"{what}: cannot take over storage {storage}: no input, pinned, or needed")
        if storages[storage].nbytes != storages[node.outputs[0]].nbytes:
            raise VerifyError(f"{what}: takes over storage {storage}, which is not as large as its output")
    if any(not 0 <= other < index for other in node.extra):
        raise VerifyError(f"{what}: order constraint on a node that does not come earlier, in {node.extra}")


def _check_ids(what: str, ids: tuple[int, ...], count: int) -> None:
    if len(set(ids)) != len(ids) or any(not 0 <= storage < count for storage in ids):
        raise VerifyError(f"{what}: storages {ids} must differ and lie in 0..{count - 1}")


def _last_write(index: int, row: StorageRow, producer: list[int], nodes: Sequence[NodeRow]) -> int:
    if producer[index] < 0 or row.nbytes < 0:
        raise VerifyError(f"storage {index}: no node makes it, or its size {row.nbytes} is negative")
    if row.last_write is None or row.last_write == producer[index]:
        return producer[index]
    if not (row.last_write in range(len(nodes)) and row.pinned and index in nodes[row.last_write].inputs):
        raise VerifyError(f"storage {index}: must be pinned, and an input of its writer {row.last_write}")
    return row.last_write


# Plans, and the complete schedules to which they expand.
# A plan is an order of the nodes and one flag per temporary storage. ``expand`` (see ``evaluator``) makes a
# complete schedule: a sequence of events. At every event there is one *current
# copy* of each storage with later readers; only REDO and LOAD replace it. A copy made by REDO stays to
# its last use, except for storages flagged REPEAT.

# Flags of a storage in a plan. A gap is the longest idle interval between two touches of a storage.
KEEP = 0  # in memory from production to last use, also by a recomputation
RECOMPUTE = 1  # freed at the start of its gap; recomputed, with all missing inputs, at the next use
SWAP = 2  # copied to the host at the start of the longest gap, loaded before the end; otherwise as KEEP
DROP = 3  # freed after the last use by a node; recomputed if a recomputation reads it later
REPEAT = 4  # as RECOMPUTE, or DROP without a gap; a copy made before the gap ends is freed after the next node

# Kinds of events; each has one argument.
FIRST = 0  # node runs as in the original step
REDO = 1  # node runs again in its recompute form
BLOCK = 2  # update block runs
STORE = 3  # the copy of a storage to the host starts, after all calls enqueued before
WAIT = 4  # the compute stream waits for the copy to the host, then frees the device memory of the storage
LOAD = 5  # device memory of the storage is allocated and loaded; the next reader waits for the load
ARRIVE = 6  # the compute stream waits for the collective that makes the storage; its input lives until here


@dataclass(frozen=True, eq=False)
class Events:
    """A complete schedule of m events. Readers (nodes, blocks, stores) read the current copy of a storage.

    A copy dies right after the last event that reads it, or right after the event that makes it if none does; storages
    that live to the end of the step do not die. Otherwise only WAIT frees memory.
    """

    kind: Int8s  # [m] FIRST ... ARRIVE
    arg: Int32s  # [m] node, block or storage
    reuse: Int32s  # [m] storage dying at this FIRST or REDO, in whose memory the output is written, or -1
    renews: Rows  # [m] outputs of this REDO that become current; other outputs die at once

    def __len__(self) -> int:
        return len(self.kind)
