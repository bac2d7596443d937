"""The arrays of a step: what rows promise and leave out, rows of numbers, and the working memory of an evaluator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.errors import VerifyError
from magis.simulate import kernel
from magis.simulate.arrays import make_scratch, make_step
from magis.simulate.evaluator import Evaluation, evaluate
from magis.simulate.kernel import MOST_COPIES
from magis.simulate.problem import (
    BlockRow,
    NodeRow,
    StorageRow,
    build_problem,
    rows_of,
)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (NodeRow((1,), (2,), 1), "reads storage 1 before"),
        (NodeRow((0,), (0,), 1), "makes storage 0, as node 0 does"),
        (NodeRow((0,), (1,), -1), "negative"),
        (NodeRow((0,), (1,), 1, ws=-1), "negative"),
        (NodeRow((0,), (1,), 1, redo_ns=-1), "negative"),
        (NodeRow((0,), (1,), 1, redo_ws=-1), "negative"),
        (NodeRow((0,), (1,), 1, ws=8, tensor=9), "tensor bytes 9 <= bytes 8"),
        (NodeRow((0,), (1,), 1, redo_ws=8, redo_tensor=9), "tensor bytes 9 <= bytes 8"),
        (NodeRow((0,), (1,), 1, tensor=-1), "0 <= tensor bytes -1"),
        (NodeRow((0, 0), (1,), 1), "must differ"),
        (NodeRow((0,), (1, 1), 1), "must differ"),
        (NodeRow((3,), (1,), 1), r"lie in 0\.\.2"),
        (NodeRow((0,), (-1,), 1), r"lie in 0\.\.2"),
        (NodeRow((0,), (1, 2), 1, reuse=(0,)), "exactly one output"),
        (NodeRow((), (1,), 1, reuse=(0,)), "no input"),
        (NodeRow((0,), (1,), 1, reuse=(0,)), "not as large"),
        (NodeRow((0,), (), 1, reuse=(0,)), "exactly one output"),
        (NodeRow((0,), (1,), 1, extra=(1,)), "does not come earlier"),
        (NodeRow((0,), (1,), 1, extra=(0, -1)), "does not come earlier"),
    ],
)
def test_rows_that_break_a_promise_are_refused(node: NodeRow, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        build_problem([NodeRow((), (0,), 1), node], [StorageRow(8), StorageRow(16), StorageRow(16)])


MESSAGE = NodeRow((0,), (1,), 0, message_ns=5)


@pytest.mark.parametrize("change", [{}, {"inputs": ()}, {"redo_ok": True, "preads": (0,), "extra": (0,)}])
def test_a_message_takes_one_storage_at_most(change: dict[str, Any]) -> None:
    """A host copy would read what it makes too early, or free what it takes."""
    nodes = [NodeRow((), (0,), 1), replace(MESSAGE, **change), NodeRow((1,), (2,), 1)]
    problem = build_problem(nodes, [StorageRow(8)] * 3, [BlockRow((2,), (), 1)], xfer_ns_per_byte=0.1)
    assert problem.message_ns.tolist() == [0, 5, 0]
    assert make_step(problem).swappable.tolist() == [0 not in nodes[1].inputs, False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"message_ns": -1}, "negative time of a message"),
        ({"inputs": (0, 2)}, "one storage at most"),
        ({"outputs": ()}, "makes one"),
        ({"outputs": (1, 4)}, "makes one"),
        ({"reuse": (0,)}, "one storage at most"),
        ({"ns": 1}, "no time of the nodes"),
        ({"redo_ns": 1}, "no time of the nodes"),
        ({"at_once": True}, "takes no time"),
        ({"inputs": (2,)}, "storage 2, is made alone, and for it alone"),
    ],
)
def test_messages_that_break_a_promise_are_refused(change: dict[str, Any], message: str) -> None:
    nodes = [NodeRow((), (0,), 1), NodeRow((), (2, 3), 1), replace(MESSAGE, **change)]
    storages = [StorageRow(8)] * (1 + max(storage for node in nodes for storage in (*node.outputs, 3)))
    with pytest.raises(VerifyError, match=message):
        build_problem(nodes, storages)


@pytest.mark.parametrize("storage", [0, 1])
@pytest.mark.parametrize("kept", [{"pinned": True}, {"to_end": True}])
def test_a_message_takes_and_makes_nothing_that_must_stay(storage: int, kept: dict[str, bool]) -> None:
    storages = [StorageRow(8), StorageRow(8)]
    storages[storage] = StorageRow(8, **kept)
    with pytest.raises(VerifyError, match=f"takes or makes storage {storage}, which is pinned or needed"):
        build_problem([NodeRow((), (0,), 1), MESSAGE], storages)


def test_nobody_else_reads_what_a_message_takes() -> None:
    nodes = [NodeRow((), (0,), 1), MESSAGE]
    storages = [StorageRow(8), StorageRow(8)]
    build_problem(nodes, storages, [BlockRow((1,), (), 1)])
    with pytest.raises(VerifyError, match="storage 0, is made alone, and for it alone"):
        build_problem(nodes, storages, [BlockRow((0,), (), 1)])
    with pytest.raises(VerifyError, match="storage 0, is made alone, and for it alone"):
        build_problem([*nodes, NodeRow((0,), (), 1)], storages)


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (StorageRow(-1), "negative"),
        (StorageRow(8, last_write=1), "must be pinned"),
        (StorageRow(8, pinned=True, last_write=2), "must be pinned"),
        (StorageRow(8, pinned=True, last_write=-1), "must be pinned"),  # the last node takes it
    ],
)
def test_storages_that_break_a_promise_are_refused(storage: StorageRow, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        build_problem([NodeRow((), (0,), 1), NodeRow((0,), (), 1)], [storage])


@pytest.mark.parametrize("kept", [{"pinned": True}, {"to_end": True}])
def test_memory_that_must_stay_is_not_taken_over(kept: dict[str, bool]) -> None:
    nodes = [NodeRow((), (0,), 1), NodeRow((0,), (1,), 1, reuse=(0,))]
    build_problem(nodes, [StorageRow(8), StorageRow(8)])
    with pytest.raises(VerifyError, match="cannot take over storage 0: no input, pinned, or needed"):
        build_problem(nodes, [StorageRow(8, **kept), StorageRow(8)])


def test_a_writer_is_a_node_that_takes_a_pinned_storage() -> None:
    nodes = [NodeRow((), (0,), 1), NodeRow((0,), (1,), 1), NodeRow((1,), (), 1)]
    written = build_problem(nodes, [StorageRow(8, pinned=True, last_write=1), StorageRow(8, last_write=1)])
    assert written.last_write.tolist() == [1, 1]
    assert build_problem(nodes, [StorageRow(8), StorageRow(8)]).last_write.tolist() == [0, 1]
    with pytest.raises(VerifyError, match="storage 0: must be pinned, and an input of its writer 2"):
        build_problem(nodes, [StorageRow(8, pinned=True, last_write=2), StorageRow(8)])


def test_what_a_row_leaves_out_is_nothing() -> None:
    problem = build_problem([NodeRow((), (0,), 1)], [StorageRow(8)], [BlockRow((0,), (), 2)])
    assert (problem.n_nodes, problem.n_storages, problem.n_blocks, problem.n_written) == (1, 1, 1, 0)
    names = ("node_ws", "node_tensor", "redo_ns", "redo_ws", "redo_tensor", "redo_ok", "pinned", "to_end")
    for name in (*names, "last_write", "blk_ws", "blk_tensor", "blk_late_ws", "blk_late_tensor"):
        assert getattr(problem, name).tolist() == [0], name
    assert not any(len(rows(0)) for rows in (problem.inputs, problem.reuses, problem.preads, problem.extras))
    assert (problem.persistent_bytes, problem.xfer_ns_per_byte) == (0, 0.0)
    assert evaluate(problem, np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int8)) == Evaluation(8, 8, 3, 0, 0)


@pytest.mark.parametrize("writes", [(), (0,), (2, 0)])
@pytest.mark.parametrize("reads", [(), (0,), (1, 3)])
def test_persistent_storages_are_counted_up_to_the_highest_number(
    writes: tuple[int, ...], reads: tuple[int, ...]
) -> None:
    problem = build_problem([NodeRow((), (), 1, preads=reads)], [], [BlockRow((), writes, 1)])
    assert problem.n_written == max((*writes, *reads), default=-1) + 1


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=5))
def test_rows_turned_hold_the_rows_that_a_number_is_in(lists: list[list[int]]) -> None:
    rows = rows_of(lists)
    assert [rows(at).tolist() for at in range(len(lists))] == lists
    assert rows.places().tolist() == [at for at, row in enumerate(lists) for _ in row]
    turned = rows.turned(7)
    assert len(turned.ptr) == 7 + 1
    for number in range(7):
        assert turned(number).tolist() == [at for at, row in enumerate(lists) for each in row if each == number]


def test_blocks_and_totals_that_break_a_promise_are_refused() -> None:
    nodes, storages = [NodeRow((), (0,), 1)], [StorageRow(8)]
    with pytest.raises(VerifyError, match="tensor bytes 9"):
        build_problem(nodes, storages, [BlockRow((0,), (0,), 1, ws=8, tensor=9)])
    with pytest.raises(VerifyError, match="block 0: needs 0 <= tensor bytes 9 <= bytes 8"):
        build_problem(nodes, storages, [BlockRow((0,), (0,), 1, late_ws=8, late_tensor=9)])
    with pytest.raises(VerifyError, match="tensor bytes -1"):
        build_problem(nodes, storages, [BlockRow((0,), (0,), 1, tensor=-1)])
    with pytest.raises(VerifyError, match="block 0"):
        build_problem(nodes, storages, [BlockRow((0,), (0,), -1)])
    with pytest.raises(VerifyError, match="must differ"):
        build_problem(nodes, storages, [BlockRow((1,), (0,), 1)])
    with pytest.raises(VerifyError, match="a node to run behind"):
        build_problem([], [], [BlockRow((), (0,), 1)])
    with pytest.raises(VerifyError, match="out of range"):
        build_problem(nodes, storages, persistent_bytes=-1)
    for slow in (-0.1, 1e6, math.nan):
        with pytest.raises(VerifyError, match="out of range"):
            build_problem(nodes, storages, xfer_ns_per_byte=slow)
    with pytest.raises(VerifyError, match="no node makes it"):
        build_problem([], storages)


@pytest.mark.parametrize("copies", [1, MOST_COPIES])
def test_working_memory_is_as_large_as_the_longest_schedule(copies: int) -> None:
    """Compiled code checks no bounds. Of each array the size for 2 nodes, 5 storages, 3 blocks."""
    nodes = [NodeRow((), (0, 1, 2), 1), NodeRow((), (3, 4), 1, redo_ok=True)]
    problem = build_problem(nodes, [StorageRow(8)] * 5, [BlockRow((0,), (), 1)] * 3)
    per_storage = (
        "until stays_from replaced redo_at held_by gap_ns gap_from"
        " gap_to touched wait_at load_at store_next wait_next load_next"
    )
    further = 2 * copies  # of the two that may be made again
    sizes = {
        "event free level reuse blk_head store_head wait_head load_head copying": (2 + further,),  # all run
        "start_ns": (2 + further + 1,),  # and the end of the last run
        "between": (further - 2, 3),  # all but the last copy
        "stack": (2, 2),
        "first_at again_at": (2,),
        "blk_place blk_next": (3,),
        per_storage: (5,),
        "last_use": (2 * 5,),
        "result": (kernel.TIMED + 1,),
    }
    found = make_scratch(make_step(problem), copies)
    expected = [(name, size) for names, size in sizes.items() for name in names.split()]
    assert sorted((name, array.shape) for name, array in found._asdict().items()) == sorted(expected)
    assert all(np.all(array == (0 if array.dtype == np.int64 else -1)) for array in found)  # -1: there is none


@pytest.mark.parametrize(
    ("storage", "in_block", "ok", "expected"),
    [
        (StorageRow(1), False, True, (True, True)),
        (StorageRow(0), False, True, (True, False)),
        (StorageRow(8), False, False, (False, True)),
        (StorageRow(8, pinned=True), False, True, (False, False)),
        (StorageRow(8, to_end=True), False, True, (False, False)),
        (StorageRow(8), True, True, (False, False)),
    ],
)
def test_what_may_be_recomputed_and_swapped(
    storage: StorageRow, expected: tuple[bool, bool], *, in_block: bool, ok: bool
) -> None:
    nodes, blocks = [NodeRow((), (0,), 1, redo_ok=ok)], [BlockRow((0,), (), 1)] * in_block
    step = make_step(build_problem(nodes, [storage], blocks, xfer_ns_per_byte=0.1))
    assert (step.redoable.tolist(), step.swappable.tolist()) == ([expected[0]], [expected[1]])
    assert step.xfer_ns.tolist() == [math.ceil(storage.nbytes / 10)]
    still = make_step(build_problem(nodes, [storage], blocks))
    assert (still.redoable.tolist(), still.swappable.tolist()) == ([expected[0]], [False])


def test_a_block_runs_after_every_reader_of_what_it_writes() -> None:
    nodes = [NodeRow((), (), 1, preads=reads) for reads in ((0,), (), (2, 0), (1,), (0,))]
    problem = build_problem(nodes, [], [BlockRow((), writes, 1) for writes in ((0,), (1, 2), ())])
    assert [make_step(problem).block_after(block).tolist() for block in range(3)] == [[0, 2, 4], [2, 3], []]
