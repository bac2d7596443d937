"""Plans spelled out: one small step, and what becomes of it under each decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from magis.errors import VerifyError
from magis.graph import Graph, Op, Ref, Storage, Value, parse, verify
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.problem import BLOCK, DROP, KEEP, RECOMPUTE, REDO, SWAP, WAIT, Events, rows_of
from tests.golden.golden import before_and_after, check_golden

STEP = """magis graph 1
storage 0 generator 0
storage 1 parameter 400
storage 2 buffer 40
storage 3 buffer 40
storage 4 batch 400
storage 10 temporary 400
storage 11 temporary 400
storage 12 temporary 40
storage 13 temporary 40
storage 14 temporary 400
storage 15 temporary 400
storage 16 temporary 4
storage 17 temporary 400
storage 18 temporary 400
storage 19 temporary 400
storage 20 temporary 400
storage 21 temporary 400
value 1 @1 float32 [10, 10] {10, 1} +0 "parameter:w"
value 2 @2 float32 [10] {1} +0 "buffer:mean"
value 3 @3 float32 [10] {1} +0 "buffer:var"
value 4 @4 float32 [10, 10] {10, 1} +0 "input:0"
value 10 @10 float32 [10, 10] {10, 1} +0
value 11 @11 float32 [10, 10] {10, 1} +0
value 12 @12 float32 [10] {1} +0
value 13 @13 float32 [10] {1} +0
value 14 @14 float32 [10, 10] {10, 1} +0
value 22 @14 float32 [10, 10] {1, 10} +0
value 15 @15 float32 [10, 10] {10, 1} +0
value 23 @15 float32 [10, 10] {10, 1} +0
value 16 @16 float32 [] {} +0
value 17 @17 float32 [10, 10] {10, 1} +0
value 18 @18 float32 [10, 10] {10, 1} +0
value 19 @19 float32 [10, 10] {10, 1} +0
value 20 @20 float32 [10, 10] {10, 1} +0
value 21 @21 float32 [10, 10] {10, 1} +0
value 24 @1 float32 [10, 10] {10, 1} +0
input 1
input 2
input 3
input 4
op 0 %10 = aten.mm.default(%4, %1) reads 1:0 4:0 phase forward module "a"
op 1 (%11, %12, %13) = aten.native_batch_norm.default(%10, None, None, %2, %3, True, 0.1, 1e-05) reads 2:0 3:0 10:0 \
writes 2:1 3:1 phase forward module "norm"
op 2 %14 = aten.gelu.default(%11) reads 11:0 phase forward module "act"
op 3 %22 = aten.t.default(%14) phase forward module "act"
op 4 %15 = aten.empty_like.default(%14) reads 14:0 phase forward module "drop"
op 5 %23 = aten.bernoulli_.float(%15, 0.5) reads 0:0 15:0 writes 0:1 15:1 random phase forward module "drop"
op 6 %17 = aten.mul.Tensor(%22, %23) reads 14:0 15:1 phase forward module "drop"
op 7 %16 = aten.mean.default(%17) reads 17:0 phase forward
op 8 %18 = aten.mul.Tensor(%23, 0.01) reads 15:1 phase backward module "drop"
op 9 %19 = aten.gelu_backward.default(%18, %11) reads 11:0 18:0 phase backward module "act"
op 10 %20 = aten.add.Tensor(%19, %22) reads 14:0 19:0 phase backward module "act"
op 11 (%21, _, _) = aten.native_batch_norm_backward.default(%20, %10, None, None, None, %12, %13, True, 1e-05, \
[True, False, False]) reads 10:0 12:0 13:0 20:0 phase backward module "norm"
op 12 %24 = aten.add_.Tensor(%1, %21, alpha=$neg_lr) reads 1:0 21:0 writes 1:1 phase update
output 16
"""


class Costs:
    """A microsecond for every operator, no scratch, a link that copies 400 bytes in a tenth of that."""

    rounding = 1
    link_bytes_per_s = 4e9
    copy_ns = 0

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        return 1000

    def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
        return 0


def step() -> Graph:
    graph = parse(STEP.replace("\\\n", ""))
    verify(graph)
    return graph


def plan(flags: dict[int, int], *, reuse: bool = False, graph: Graph | None = None) -> tuple[Compiled, Events]:
    """The schedule of a plan that keeps everything but for ``flags``, by storage of the graph."""
    compiled = compile_problem(graph or step(), Costs(), reuse=reuse)
    chosen = [flags.get(storage, KEEP) for storage in compiled.storages]
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    return compiled, expand(compiled.problem, order, np.array(chosen, dtype=np.int8))


def realized(flags: dict[int, int], *, reuse: bool = False) -> Graph:
    graph = realize(*plan(flags, reuse=reuse))
    verify(graph)
    return graph


def calls(graph: Graph) -> list[str]:
    return [op.target.split(".")[1] for op in graph.ops]


@pytest.mark.parametrize(
    ("name", "flags", "reuse"),
    [
        # add and gelu_backward write over inputs that die with them; the update floats up to its gradient
        ("take_over", {}, True),
        # norm again: without statistics, for its output only; gelu_backward then reads the new copy
        ("batch_norm_again", {11: RECOMPUTE}, False),
        # noise again: with the generator's state of the first time
        ("random_again", {15: RECOMPUTE}, False),
        # mm's output leaves after the norm and comes back for the norm's backward
        ("swap", {10: SWAP}, False),
        # dropped after gelu, made again with all that is missing for it; views are opened anew on the new copy
        ("chain_again", {10: DROP, 11: RECOMPUTE, 14: RECOMPUTE}, False),
    ],
)
def test_decisions(name: str, flags: dict[int, int], reuse: bool) -> None:
    after = realized(flags, reuse=reuse)
    assert any(op not in step().ops for op in after.ops)
    check_golden(f"realize_{name}.txt", before_and_after(step(), after))


def test_a_plan_that_decides_nothing_is_the_step() -> None:
    """But for the ids, and for views, which are opened where they are first needed."""
    assert sorted(calls(realized({}))) == sorted(calls(step()))
    assert calls(realized({})).index("t") == calls(realized({})).index("mul") - 1


def test_origins_lead_back() -> None:
    after = realized({11: RECOMPUTE, 15: RECOMPUTE}, reuse=True)
    by_id = {op.id: op for op in step().ops}
    for op in after.ops:
        if op.target.startswith("magis."):
            assert op.origin is None
        else:
            assert op.origin is not None
            assert op.module == by_id[op.origin].module
            assert op.phase == by_id[op.origin].phase
    assert [op.id for op in after.ops] == list(range(len(after.ops)))


def test_statistics_are_updated_once() -> None:
    after = realized({11: RECOMPUTE})
    norms = [op for op in after.ops if op.target == "aten.native_batch_norm.default"]
    assert [len(op.writes) for op in norms] == [2, 0]
    assert norms[1].args[3] is norms[1].args[4] is None
    assert not set(norms[0].made()) & set(norms[1].made())


def test_random_numbers_are_drawn_once() -> None:
    after = realized({15: RECOMPUTE})
    draws = [op for op in after.ops if op.target == "aten.bernoulli_.float"]
    assert [op.random for op in draws] == [True, False]
    assert [(0, 1) in op.writes for op in draws] == [True, False]
    names = calls(after)
    assert [names[names.index(start) + 1] for start in ("rng_save", "rng_enter")] == ["empty_like", "empty_like"]
    assert names[names.index("rng_enter") + 3] == "rng_leave"
    saved, entered, left = (
        next(op for op in after.ops if op.target == f"magis.rng_{w}") for w in ("save", "enter", "leave")
    )
    assert entered.inputs() == saved.made()
    assert left.inputs() == entered.made()
    assert all(after.storages[after.values[v].storage].kind == "host" for v in (*saved.made(), *entered.made()))


def test_no_state_is_saved_for_noise_that_stays() -> None:
    assert not [name for name in calls(realized({11: RECOMPUTE})) if name.startswith("rng")]


def test_a_swapped_storage_keeps_its_version() -> None:
    """Noise is written once after it is made; what comes back from the host counts as written, but starts anew."""
    graph = step()
    more = [  # something to do while it is away
        Op(n, "aten.exp.default", graph.ops[7].args if n == 30 else (Ref(n + 9),), (), (n + 10,),
           reads=((17, 0) if n == 30 else (n - 1, 0),))
        for n in (30, 31, 32)
    ]  # fmt: skip
    storages = {**graph.storages, **{n: Storage(n, 400, "temporary") for n in (30, 31, 32)}}
    values = {**graph.values, **{n + 10: replace(graph.values[17], id=n + 10, storage=n) for n in (30, 31, 32)}}
    graph = replace(graph, storages=storages, values=values, ops=(*graph.ops[:8], *more, *graph.ops[8:]))
    verify(graph)
    after = realize(*plan({15: SWAP}, graph=graph))
    verify(after)
    load, store = (next(op for op in after.ops if op.target == f"magis.{name}") for name in ("load", "store"))
    copy = after.values[load.made()[0]].storage
    assert [version for _, version in store.reads] == [1]
    assert after.values[store.made()[0]].shape == after.values[load.made()[0]].shape == (10, 10)
    (reader,) = [op for op in after.ops if load.made()[0] in op.inputs()]
    assert reader.origin == 8
    assert reader.reads == ((copy, 0),)


def test_memory_taken_over_is_written_by_version() -> None:
    after = realized({}, reuse=True)
    taken = [op for op in after.ops if op.writes and op.phase == "backward"]
    assert [op.target for op in taken] == [
        "aten.mul_.Tensor", "aten.gelu_backward.grad_input", "aten.add_.Tensor",
    ]  # fmt: skip
    assert dict(taken[1].kwargs)["grad_input"] == taken[1].args[0]
    assert len({storage for op in taken for storage, _ in op.writes}) == 1  # one piece of memory through all three
    assert [version for op in taken for _, version in op.writes] == [2, 3, 4]


def test_the_second_operand_of_a_product_may_be_taken_over() -> None:
    """Where the first is still wanted; the operands then change places."""
    graph = step()
    noise = graph.ops[6].args[1]
    ops = tuple(
        replace(op, args=(graph.ops[2].args[0], noise)) if op.id == 6
        else replace(op, args=(graph.ops[9].args[1], 0.01), reads=((11, 0),)) if op.id == 8
        else op
        for op in graph.ops
        if op.id != 3
    )  # fmt: skip
    ops = tuple(replace(op, reads=((11, 0), (15, 1))) if op.id == 6 else op for op in ops)
    ops = tuple(
        replace(op, args=(op.args[0], graph.ops[2].args[0]), reads=((11, 0), (19, 0))) if op.id == 10 else op
        for op in ops
    )
    changed = replace(graph, ops=ops)
    verify(changed)
    compiled = compile_problem(changed, Costs())
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    after = realize(compiled, expand(compiled.problem, order, np.zeros(compiled.problem.n_storages, dtype=np.int8)))
    verify(after)
    (product,) = [op for op in after.ops if op.origin == 6]
    (drawn,) = [op for op in after.ops if op.origin == 5]
    assert product.target == "aten.mul_.Tensor"
    assert product.inputs()[0] == drawn.made()[0]
    assert product.writes == ((after.values[drawn.made()[0]].storage, 2),)


# --- schedules that cannot be -----------------------------------------------------------------------------------------


def without(events: Events, at: int) -> Events:
    """The schedule with one event left out."""
    keep = np.arange(len(events)) != at
    renews = rows_of(list(events.renews(index)) for index in np.flatnonzero(keep))
    return Events(events.kind[keep], events.arg[keep], events.reuse[keep], renews)


@pytest.mark.parametrize("flags", [{}, {11: RECOMPUTE}, {10: SWAP}, {15: RECOMPUTE}])
def test_a_schedule_that_lacks_an_event_is_refused(flags: dict[int, int]) -> None:
    """Without an event, something is read that is not there, or in another state: unless an older copy is as good."""
    compiled, events = plan(flags)
    survived = set()
    for at in range(len(events)):
        try:
            verify(realize(compiled, without(events, at)))
        except (VerifyError, KeyError):
            continue
        survived.add(int(events.kind[at]))
    # The weight's update is nobody's input; a copy that is not renewed, or not given back, only costs memory.
    assert survived <= {BLOCK, REDO, WAIT}
    assert BLOCK in survived
