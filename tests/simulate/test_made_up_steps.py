"""Made-up steps, compiled: what plans of them cost, loops and what goes on in their output, messages beside nodes."""

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
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import Evaluator, evaluate
from magis.simulate.simulator import replay
from magis.simulate.timeline import elapsed_ns
from tests.graph.loop_graphs import both, value
from tests.graph.loop_graphs import op as change
from tests.simulate.plans import random_order
from tests.simulate.small_step import Bytes, ids
from tests.strategies import examples, random_flags, schedules


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
ON_HOST = "  storage 4 host 48\n  value 5 @4 float32 [2, 6] {6, 1} +0\n"


def test_a_loop_and_what_goes_on_in_its_output_need_the_memory_inside_the_loop() -> None:
    graph = parse(LOOP)
    verify(graph)
    found, profile = compile_problem(graph, ByInputs()), replay(graph, ByInputs().workspace)
    assert ids(found.nodes) == [[0, 1], [2]]
    judged = evaluate(found.problem, np.arange(2, dtype=np.int32), np.zeros(2, dtype=np.int8))
    assert (judged.peak, judged.tensor_peak) == (profile.peak_bytes, profile.tensor_bytes)
    assert profile.tensor_bytes == 96 + 16 + 48 + 8
    assert found.problem.copies.tolist() == [False, False]
    swap = "op 4 %5 = magis.store(%3) reads 2:0 phase forward\n  op 5 = magis.wait(%3, %5) phase forward"
    swapping = LOOP.replace("\nend", f"\n  {swap}\nend").replace("  input 0\n", f"{ON_HOST}  input 0\n")
    verify(parse(swapping))
    assert compile_problem(parse(swapping), ByInputs()).problem.copies.tolist() == [True, False]


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
