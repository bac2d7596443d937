"""A graph's arrays: what is a node, what a block, what may be repeated, re-used, moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.graph import BESIDE, Graph, Op, Ref, Value, parse, verify
from magis.graph.hazards import is_pure_view
from magis.ops.collectives import WAITS
from magis.rewrite.functionalize import functionalize
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import GENERATOR_NS, compile_problem, redo_form, reusable
from magis.simulate.evaluator import Evaluator, check_order, evaluate
from magis.simulate.simulator import replay
from magis.simulate.timeline import elapsed_ns
from tests.graph.loop_graphs import both, value
from tests.graph.loop_graphs import op as change
from tests.nets import NETS
from tests.oracles import Costs, captured
from tests.simulate.plans import random_order
from tests.simulate.small_step import Bytes, change_op, compiled, ids, step
from tests.strategies import examples, random_flags, schedules


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


# --- plans of made-up steps -------------------------------------------------------------------------------------------


class ByInputs(Bytes):
    """Views and copies need no scratch."""

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        return 10 + 7 * len(op.inputs()) + sum(values[value].nbytes for value in op.made())

    def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
        return 0 if op.target.startswith("magis.") or is_pure_view(values, op) else 10 * len(op.inputs())


def with_messages(graph: Graph, rng: np.random.Generator) -> Graph:
    """The same step on one device, where a view looks at one tensor and half of what makes one tensor is a message."""
    ops = list[Op]()
    for op in graph.ops:
        first = {graph.values[ref.value].storage for ref in op.args[:1] if isinstance(ref, Ref)}
        if ".view." in op.target:
            ops.append(replace(op, args=op.args[:1]))
        elif ".make." in op.target and len(op.made()) == 1 and rng.random() < 0.5:
            reads = tuple(read for read in op.reads if read[0] in first)
            ops.append(replace(op, target=BESIDE[0], args=op.args[:1], reads=reads))
        else:
            ops.append(op)
    storages = {s.id: replace(s, kind="temporary") if s.kind == "host" else s for s in graph.storages.values()}
    return replace(graph, ops=tuple(ops), storages=storages)


@examples(60)
@given(schedules(14), st.integers(0, 2**32 - 1))
def test_plans_of_made_up_steps_cost_what_their_graphs_say(graph: Graph, seed: int) -> None:
    """Several outputs, partly covered and overwritten storages, random numbers, messages: all legal, byte for byte."""
    rng, costs = np.random.default_rng(seed), ByInputs()
    found = compile_problem(with_messages(graph, rng), costs)
    evaluator = Evaluator(found.problem, random_order(found.problem, rng))
    judged = evaluator.evaluate(random_flags(found.problem, rng))
    planned = realize(found, evaluator.events())
    verify(planned)
    profile = replay(planned, costs.workspace)
    assert judged.tensor_peak == profile.tensor_bytes
    assert judged.latency_ns == elapsed_ns(planned, costs)
    # a node of several operators holds its inputs to its end
    assert judged.peak >= profile.peak_bytes
    assert judged.peak == profile.peak_bytes or any(len(group) > 1 for group in found.nodes)


LOOP = """magis graph 1
storage 1 batch 96
storage 2 temporary 16
storage 3 temporary 16
value 1 @1 float32 [4, 6] {6, 1} +0 "input:0"
value 2 @2 float32 [4] {1} +0
value 3 @2 float32 [4] {1} +0
value 4 @3 float32 [4] {1} +0
input 1
op 0 (%2) = magis.loop(%1) reads 1:0 phase forward parts 2
  storage 0 outer 96
  storage 1 outer 16
  storage 2 temporary 48
  storage 3 temporary 8
  value 0 @0 float32 [4, 6] {6, 1} +0
  value 1 @1 float32 [4] {1} +0
  value 2 @0 float32 [2, 6] {6, 1} +0
  value 3 @2 float32 [2, 6] {6, 1} +0
  value 4 @3 float32 [2] {1} +0
  input 0
  input 1
  op 0 %2 = magis.part(%0, 0) phase forward
  op 1 %3 = aten.exp.default(%2) reads 0:0 phase forward
  op 2 %4 = aten.sum.dim_IntList(%3, [1]) reads 2:0 phase forward
  op 3 = magis.join(%1, %4, 0) reads 1:0 3:0 writes 1:1 phase forward
end
op 1 %3 = aten.mul_.Scalar(%2, 2.0) reads 2:0 writes 2:1 phase forward
op 2 %4 = aten.neg.default(%3) reads 2:1 phase forward
output 4
"""


def test_a_loop_and_what_goes_on_in_its_output_need_the_memory_inside_the_loop() -> None:
    graph = parse(LOOP)
    verify(graph)
    found, profile = compile_problem(graph, ByInputs()), replay(graph, ByInputs().workspace)
    assert ids(found.nodes) == [[0, 1], [2]]
    judged = evaluate(found.problem, np.arange(2, dtype=np.int32), np.zeros(2, dtype=np.int8))
    assert (judged.peak, judged.tensor_peak) == (profile.peak_bytes, profile.tensor_bytes)
    assert profile.tensor_bytes == 96 + 16 + 48 + 8


# --- messages beside the nodes ----------------------------------------------------------------------------------------

SENT = """magis graph 1
storage 1 parameter 400
storage 10 temporary 400
storage 11 temporary 400
storage 12 temporary 400
storage 13 temporary 400
storage 14 temporary 400
value 1 @1 float32 [100] {1} +0 "parameter:w"
value 2 @1 float32 [100] {1} +0
value 10 @10 float32 [100] {1} +0
value 11 @11 float32 [100] {1} +0
value 12 @12 float32 [100] {1} +0
value 13 @13 float32 [100] {1} +0
value 14 @14 float32 [100] {1} +0
value 15 @11 float32 [100] {1} +0
input 1
op 5 %10 = aten.neg.default(%1) reads 1:0 phase forward
op 6 %11 = _c10d_functional.all_reduce.default(%10, "sum", "dp") reads 10:0 phase forward
op 7 %12 = aten.exp.default(%1) reads 1:0 phase forward
op 8 %13 = aten.mul.Tensor(%11, %12) reads 11:0 12:0 phase forward
output 13
"""
OF_WEIGHT = change(1, args=(Ref(1), "sum", "dp"), reads=((1, 0),))
OVERWRITE = {"outputs": (2,), "writes": ((1, 1),)}
IN_PLACE = {"target": "aten.exp_.default", "args": (Ref(11),), "reads": ((11, 0),), "writes": ((11, 1),)}
BESIDE_OTHERS: dict[str, Callable[[Graph], Graph]] = {
    "as it stands": lambda graph: graph,
    "of what persists": OF_WEIGHT,
    "gathered": change(1, target=BESIDE[0]),
    "scattered": change(1, target=BESIDE[1]),
    "another tensor in two": change(2, outputs=(12, 14), many=True),
    "another tensor written": both(change(3, **OVERWRITE), lambda graph: replace(graph, outputs=())),
}
AT_ONCE: dict[str, Callable[[Graph], Graph]] = {
    "another message": change(1, target="_c10d_functional.all_to_all_single.default"),
    "a wait": change(2, target=WAITS[0]),
    "read by another node": change(2, args=(Ref(10),), reads=((10, 0),)),
    "read by an update": change(2, args=(Ref(10), Ref(1)), reads=((1, 0), (10, 0)), phase="update", **OVERWRITE),
    "made beside another": change(0, outputs=(10, 14), many=True),
    "of two tensors": change(1, outputs=(11, 14), many=True),
    "sent and returned": lambda graph: replace(graph, outputs=(13, 10)),
    "brought and returned": lambda graph: replace(graph, outputs=(13, 11)),
    "a part of its storage sent": value(10, shape=(99,)),
    "a part of its storage brought": value(11, shape=(99,)),
    "overwritten at once": both(
        change(2, outputs=(15,), **IN_PLACE), change(3, args=(Ref(15), Ref(1)), reads=((1, 0), (11, 1)))
    ),
    "a parameter that a node overwrites": both(
        OF_WEIGHT, change(3, **OVERWRITE), lambda graph: replace(graph, outputs=())
    ),
}


@pytest.mark.parametrize(("name", "changed"), [*BESIDE_OTHERS.items(), *AT_ONCE.items()])
def test_a_message_runs_beside_the_nodes_if_it_alone_uses_its_memory(
    name: str, changed: Callable[[Graph], Graph]
) -> None:
    found = compile_problem(changed(parse(SENT)), Bytes())
    (node,) = (at for at, group in enumerate(found.nodes) if group[0].id == 6)
    problem, time = found.problem, sum(1000 * each.id for each in found.nodes[node])
    beside = name in BESIDE_OTHERS
    times = [int(ns[node]) for ns in (problem.message_ns, problem.node_ns, problem.redo_ns)]
    assert times == ([time, 0, 0] if beside else [0, time, time])
    assert problem.at_once[node] == (not beside)
    assert sum(map(bool, problem.message_ns.tolist())) == beside
