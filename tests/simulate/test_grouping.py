"""Who floats, and which operators act as one."""

from __future__ import annotations

from dataclasses import replace

from magis.graph import Op, Ref, verify
from magis.rewrite.functionalize import functionalize
from magis.simulate.compiled_problem import nodes_and_blocks
from tests.nets import NETS
from tests.oracles import captured
from tests.simulate.small_step import change_op, compiled, ids, step


def test_a_block_waits_for_nobody_but_readers() -> None:
    nodes, blocks = nodes_and_blocks(step())
    assert [op.id for group in blocks for op in group] == [0, 9, 10, 11]
    # somebody meets what operator 0 wrote: it stays where it is, and so does whoever it depends on
    meets = change_op(step(), 7, reads=((3, 1), (12, 0)))
    nodes, blocks = nodes_and_blocks(meets)
    assert ids(nodes)[0] == [0]
    assert ids(blocks) == [[9, 10, 11]]
    writes = change_op(step(), 7, reads=((3, 1), (12, 0)), writes=((3, 2),))
    assert ids(nodes_and_blocks(writes)[1]) == [[9, 10, 11]]
    overwrites = change_op(step(), 7, writes=((3, 2),))  # without a look at what was there
    assert ids(nodes_and_blocks(overwrites)[0])[0] == [0]
    assert ids(nodes_and_blocks(overwrites)[1]) == [[9, 10, 11]]


def test_an_update_that_is_read_afterwards_stays() -> None:
    late = Op(12, "aten.sum.default", step().ops[11].args[:1], (), (), reads=((1, 1),))
    graph = step()
    _, blocks = nodes_and_blocks(replace(graph, ops=(*graph.ops, late)))
    assert ids(blocks) == [[0]]  # nor does the operator that it reads from float, nor what else reads from that


def test_what_an_update_that_stays_takes_stays() -> None:
    """Directly or through a view; a temporary storage has no version to meet."""
    graph = step()
    ops = [*graph.ops, Op(12, "aten.sum.default", graph.ops[11].args[:1], (), (), reads=((1, 1),))]
    ops[11] = replace(ops[11], args=(ops[11].args[0], Ref(20)), reads=((1, 0), (15, 0)))
    assert ids(nodes_and_blocks(replace(graph, ops=tuple(ops)))[1]) == [[0]]
    values = {**graph.values, 21: replace(graph.values[20], id=21)}
    view = Op(13, "aten.view.default", (Ref(20), (200,)), (), (21,), phase="update")
    ops[11] = replace(ops[11], args=(ops[11].args[0], Ref(21)))
    assert ids(nodes_and_blocks(replace(graph, ops=(*ops[:11], view, *ops[11:]), values=values))[1]) == [[0]]
    # a view that only updates take holds nothing back
    assert ids(nodes_and_blocks(replace(graph, ops=(*ops[:11], view, ops[11]), values=values))[1]) == [[0], [9, 10, 11]]


def test_nothing_floats_where_nothing_else_runs() -> None:
    graph = step()
    counter = replace(graph, ops=(graph.ops[0], graph.ops[9]), outputs=())
    assert ids(nodes_and_blocks(counter)[0]) == [[0], [9]]
    assert ids(nodes_and_blocks(counter)[1]) == []


def test_noise_in_a_buffer_is_drawn_in_its_turn() -> None:
    """It feeds nobody, but it comes after all random numbers before it."""
    graph = step()
    noise = replace(
        graph.ops[0], target="aten.random_.default", random=True, reads=((0, 1), (3, 0)), writes=((0, 2), (3, 1))
    )
    graph = replace(graph, ops=(*graph.ops[1:8], noise, *graph.ops[8:]))
    verify(graph)
    nodes, blocks = nodes_and_blocks(graph)
    assert [0] in ids(nodes)
    assert ids(blocks) == [[9, 10, 11]]
    assert compiled(graph).problem.extras(4).tolist() == [1]


def test_views_belong_to_nobody() -> None:
    """Not even where only updates take them."""
    graph = step()
    values = {**graph.values, 21: replace(graph.values[1], id=21), 22: replace(graph.values[20], id=22)}
    views = [
        Op(13, "aten.view.default", (Ref(1), (100,)), (), (21,), phase="update"),
        Op(14, "aten.view.default", (Ref(20), (200,)), (), (22,), phase="update"),
    ]
    nodes, blocks = nodes_and_blocks(replace(graph, ops=(*graph.ops[:11], *views, graph.ops[11]), values=values))
    assert not {13, 14} & {op.id for group in (*nodes, *blocks) for op in group}


def test_updates_that_return_nothing_share_a_block() -> None:
    """A fused operator may write a weight and its moments without a word; who reads those must come after it."""
    graph = step()
    first = replace(graph.ops[9], outputs=(), args=(graph.ops[9].args[0], 0.9))
    second = replace(graph.ops[11], args=(graph.ops[11].args[0], graph.ops[9].args[0]), outputs=())
    graph = replace(graph, ops=(*graph.ops[:9], first, second))
    assert ids(nodes_and_blocks(graph)[1]) == [[0], [9, 11]]


def test_buffers_that_the_forward_reads_are_written_in_time() -> None:
    """A running mean, updated and then subtracted."""
    graph = functionalize(captured(NETS["buffers"].build()).graph)
    nodes, blocks = nodes_and_blocks(graph)
    floating = {op.target for group in blocks for op in group if op.phase == "forward"}
    writers = [op for group in nodes for op in group if any(graph.storages[s].kind == "buffer" for s, _ in op.writes)]
    assert len(writers) == 2  # the mean: scaled and added to
    assert floating == {"aten.add_.Tensor"}  # the count of calls


def test_groups_end_where_somebody_else_writes() -> None:
    graph = step()
    assert ids(nodes_and_blocks(graph)[0])[1] == [3, 4, 5]
    later = change_op(graph, 8, writes=((11, 3),))
    assert [3] in ids(nodes_and_blocks(later)[0])
    other = change_op(graph, 5, writes=((10, 1), (11, 2)))
    assert [3, 4] not in ids(nodes_and_blocks(other)[0])
