"""A graph's arrays: what is a node, what a block, what may be repeated, re-used, moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from magis.graph import Graph, Op, Ref, Value, verify
from magis.rewrite.functionalize import functionalize
from magis.simulate.compiled_problem import GENERATOR_NS, compile_problem, redo_form, reusable
from magis.simulate.evaluator import check_order, evaluate
from tests.graph.loop_graphs import both, value
from tests.nets import NETS
from tests.oracles import Costs, captured
from tests.simulate.small_step import Bytes, change_op, compiled, ids, step


def test_operators_become_nodes_and_blocks() -> None:
    """Views are neither; what fills one storage in several steps is one node; what updates one weight one block."""
    found = compiled()
    assert ids(found.nodes) == [[1], [3, 4, 5], [6], [7], [8]]
    assert ids(found.blocks) == [[0], [9, 10, 11]]
    assert found.storages == (10, 11, 12, 13, 14)


def test_the_rows_of_a_step() -> None:
    problem = compiled().problem
    rows = [
        [a.tolist() for a in (problem.inputs(n), problem.outputs(n), problem.reuses(n), problem.preads(n))]
        for n in range(5)
    ]
    assert rows == [
        [[], [0], [], [0]],  # reads w, which a block writes
        [[0], [1], [], []],
        [[0, 1], [2], [0, 1], []],
        [[2], [3], [], []],
        [[1, 2], [4], [1, 2], []],
    ]
    assert problem.node_ns.tolist() == [1000, 12_000, 6000, 7000, 8000]
    assert problem.redo_ns.tolist() == [1000, 12_000 + GENERATOR_NS, 6000, 7000, 8000]
    assert problem.node_ws.tolist() == [20, 10, 20, 10, 20]
    assert problem.redo_ok.all()
    assert problem.nbytes.tolist() == [400, 400, 400, 4, 400]
    assert problem.producer.tolist() == problem.last_write.tolist() == [0, 1, 2, 3, 4]
    assert problem.to_end.tolist() == [False, False, False, True, False]
    assert not problem.pinned.any()
    assert problem.persistent_bytes == 400 + 400 + 8 + 400
    assert problem.xfer_ns_per_byte == 0.5


def test_the_scratch_of_a_node_is_that_of_its_worst_operator() -> None:
    """Beside what it takes and makes: noise is drawn with more scratch than it is allocated or divided with."""

    class Scratch(Bytes):
        def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
            return {3: 1, 4: 7, 5: 2}.get(op.id, 0)

    problem = compile_problem(step(), Scratch()).problem
    assert problem.node_ws.tolist() == problem.redo_ws.tolist() == [0, 7, 0, 0, 0]
    assert not problem.node_tensor.any()


def test_the_rows_of_blocks() -> None:
    """The gradient is read by the second of three operators: before, it counts beside what the block makes."""
    problem = compiled().problem
    assert [problem.block_inputs(b).tolist() for b in range(2)] == [[], [4]]
    assert [problem.block_writes(b).tolist() for b in range(2)] == [[2], [0, 1]]
    assert problem.blk_ns.tolist() == [0, 30_000]
    assert problem.blk_ws.tolist() == [0, 820]  # cat: 800 bytes made, two inputs
    assert problem.blk_tensor.tolist() == [0, 800]
    assert problem.blk_late_ws.tolist() == [10, 20]
    assert problem.blk_late_tensor.tolist() == [0, 0]


def test_allocators_round() -> None:
    class Rounded(Bytes):
        rounding = 512
        link_bytes_per_s = 0.0
        copy_ns = 0

    problem = compile_problem(step(), Rounded()).problem
    assert problem.nbytes.tolist() == [512] * 5
    assert problem.persistent_bytes == 4 * 512
    assert problem.blk_tensor.tolist() == [0, 1024]
    assert problem.xfer_ns_per_byte == 0.0


def test_without_reuse_nothing_is_taken_over() -> None:
    assert len(compiled(reuse=False).problem.reuses.idx) == 0


NOT_REUSED: dict[str, Callable[[Graph], Graph]] = {
    "another operator": lambda g: change_op(g, 6, target="aten.cat.default"),
    "several outputs": lambda g: change_op(g, 6, outputs=(12, 12), many=True),
    "a list of one": lambda g: change_op(g, 6, many=True),
    "writes": lambda g: change_op(g, 6, writes=((11, 3),)),
    "random": lambda g: change_op(g, 6, random=True),
    "another shape": value(12, shape=(10, 10), stride=(10, 1)),
    "another stride": value(12, shape=(50,), stride=(2,)),
    "another type": value(12, dtype="int32"),
    "a part of its storage": lambda g: replace(g, storages={**g.storages, 12: replace(g.storages[12], nbytes=404)}),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_REUSED)
def test_what_may_not_be_taken_over(name: str) -> None:
    graph = step()
    assert reusable(graph, graph.ops[6]) == (10, 19)
    spoilt = NOT_REUSED[name](graph)
    assert reusable(spoilt, spoilt.ops[6]) == ()


def test_which_input_may_be_taken_over() -> None:
    graph = step()
    mul = graph.ops[6]

    def found(**change: object) -> tuple[int, ...]:
        return reusable(graph, replace(mul, **change))  # type: ignore[arg-type]

    assert found(args=mul.args[::-1]) == (19, 10)  # the first by preference
    assert found(target="aten.sub.Tensor") == (10,)  # not commutative
    assert found(target="aten.add.Tensor", kwargs=(("alpha", 2),)) == (10,)
    assert found(args=(mul.args[0], 2.0)) == (10,)
    assert found(args=(2.0, mul.args[0])) == (10,)  # type: ignore[comparison-overlap]
    assert found(args=(mul.args[0], mul.args[0])) == ()  # both operands would be overwritten
    assert found(target="aten.gelu_backward.default") == (10, 19)
    assert found(target="aten.gelu.default", args=(mul.args[1],)) == (19,)
    parameter = replace(mul, args=(graph.ops[1].args[1], mul.args[1]))
    assert reusable(graph, parameter) == (19,)  # persistent memory is nobody's
    whole = value(10, offset=1, shape=(99,))(graph)
    assert reusable(whole, whole.ops[6]) == (19,)  # a part of its storage


@pytest.mark.parametrize(("dim", "stride", "expected"), [
    (-1, (20, 5, 1), (10,)), (2, (20, 5, 1), (10,)), (1, (20, 5, 1), ()), (0, (20, 5, 1), ()), (-1, (1, 5, 20), ()),
])  # fmt: skip
def test_a_softmax_of_rows_may_take_its_input_over(
    dim: int, stride: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    shape = (5, 4, 5)
    graph = both(value(10, shape=shape, stride=stride), value(12, shape=shape, stride=stride))(step())
    softmax = replace(graph.ops[6], target="aten._softmax.default", args=(Ref(10), dim, False), reads=((10, 0),))
    assert reusable(graph, softmax) == expected


def test_a_returned_or_pinned_input_is_not_taken_over() -> None:
    graph = replace(step(), outputs=(13, 16))  # a view of storage 10
    assert compiled(graph).problem.reuses(2).tolist() == [1]
    graph = change_op(step(), 8, target="aten.mul_.Tensor", outputs=(18,), writes=((11, 3),))
    found = compiled(replace(graph, outputs=(13,)))
    assert ids(found.nodes) == [[1], [3], [4], [5], [6], [7], [8]]
    assert found.problem.pinned.tolist() == [False, True, False, False]
    assert found.problem.reuses(4).tolist() == [0]
    assert found.problem.last_write.tolist() == [0, 6, 4, 5]


def test_what_may_not_be_repeated() -> None:
    """A node whose input somebody writes later, who writes somebody else's memory, or who makes nothing."""
    graph = change_op(
        step(),
        8,
        target="aten.add_.Tensor",
        args=step().ops[6].args,
        outputs=(14,),
        reads=((10, 0),),
        writes=((10, 1),),
    )
    graph = value(14, storage=10)(graph)
    problem = compiled(replace(graph, ops=graph.ops[:9])).problem
    assert problem.redo_ok.tolist() == [False, False, False, True, False]
    assert problem.pinned.tolist() == [True, False, False, False]
    assert problem.extras(4).tolist() == [1, 2]  # readers of what it overwrites


def test_nothing_is_repeated_of_a_node_that_makes_a_pinned_storage() -> None:
    """Though its other output could be copied: the node would make both anew."""
    graph = change_op(step(), 7, outputs=(13, 14), many=True)
    graph = replace(graph, ops=graph.ops[:8])
    assert compiled(graph).problem.redo_ok.tolist() == [True, True, True, True]
    write = Op(8, "aten.mul_.Tensor", (Ref(14), 2.0), (), (30,), reads=((14, 0),), writes=((14, 1),))
    graph = replace(graph, ops=(*graph.ops, write), values={**graph.values, 30: replace(graph.values[14], id=30)})
    verify(graph)
    problem = compiled(graph).problem
    assert problem.pinned.tolist() == [False, False, False, False, True]
    assert problem.redo_ok.tolist() == [True, True, True, False, False]


def test_nodes_keep_the_order_of_hazards() -> None:
    net = NETS["stale-views"].build()
    found = compile_problem(captured(net).graph, Costs(captured(net).graph))
    assert any(len(found.problem.extras(node)) for node in range(found.problem.n_nodes))
    check_order(found.problem, np.arange(found.problem.n_nodes, dtype=np.int32))


def test_storages_that_no_value_shows_are_pinned() -> None:
    """The memory behind a mean of squares is as large as the squares."""
    found = captured(NETS["scaled-loss"].build()).graph
    problem = compile_problem(found, Costs(found)).problem
    loss = next(op for op in found.ops if op.target == "aten.mse_loss.default")
    storage = found.values[loss.made()[0]].storage
    assert found.storages[storage].nbytes == 50 * 30 * 4
    compiled_storages = compile_problem(found, Costs(found)).storages
    assert problem.pinned[compiled_storages.index(storage)]


# --- running again ----------------------------------------------------------------------------------------------------


def test_a_repetition_leaves_statistics_and_the_generator_alone() -> None:
    graph = captured(NETS["batch-norm"].build()).graph
    norm = next(op for op in graph.ops if op.target == "aten.native_batch_norm.default")
    again = redo_form(norm, graph)
    assert norm.args[3] is not None
    assert again.args[3] is again.args[4] is None
    assert again.writes == ()
    assert {storage for storage, _ in again.reads} == {s for s, _ in norm.reads} - {s for s, _ in norm.writes}
    assert again.args[:3] == norm.args[:3]
    assert again.args[5:] == norm.args[5:]
    assert again.outputs == norm.outputs
    small = step()
    again = redo_form(small.ops[4], small)
    assert (again.random, again.reads, again.writes) == (False, ((11, 0),), ((11, 1),))
    assert redo_form(small.ops[6], small) == small.ops[6]


def test_an_evaluated_norm_repeats_as_it_is() -> None:
    graph = captured(NETS["batch-norm-evaluated"].build()).graph
    norm = next(op for op in graph.ops if op.target == "aten.native_batch_norm.default")
    assert redo_form(norm, graph) == norm


@pytest.mark.parametrize("name", ["tied", "batch-norm", "attention-dropout", "numbers"])
def test_the_program_as_it_stands_costs_what_its_rows_say(name: str) -> None:
    graph = functionalize(captured(NETS[name].build()).graph)
    costs = Costs(graph)
    found = compile_problem(graph, costs)
    problem = found.problem
    plan = np.zeros(problem.n_storages, dtype=np.int8)
    result = evaluate(problem, np.arange(problem.n_nodes, dtype=np.int32), plan)
    everything = [op for group in (*found.nodes, *found.blocks) for op in group]
    assert result.latency_ns == sum(costs.nanoseconds(op, graph.values) for op in everything)
    assert len({op.id for op in everything}) == len(everything)
