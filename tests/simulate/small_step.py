"""One small step, written out, and its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from magis.graph import Graph, Op, Value, parse, verify
from magis.simulate.compiled_problem import Compiled, compile_problem

STEP = """magis graph 1
storage 0 generator 0
storage 1 parameter 400
storage 2 state 400
storage 3 buffer 8
storage 4 batch 400
storage 10 temporary 400
storage 11 temporary 400
storage 12 temporary 400
storage 13 temporary 4
storage 14 temporary 400
storage 15 temporary 800
value 1 @1 float32 [100] {1} +0 "parameter:w"
value 2 @2 float32 [100] {1} +0 "state:m:w"
value 3 @3 int64 [] {} +0 "buffer:n"
value 4 @4 float32 [100] {1} +0 "input:0"
value 9 @3 int64 [] {} +0
value 10 @10 float32 [100] {1} +0
value 16 @10 float32 [10, 10] {10, 1} +0
value 11 @11 float32 [100] {1} +0
value 18 @11 float32 [100] {1} +0
value 19 @11 float32 [100] {1} +0
value 12 @12 float32 [100] {1} +0
value 13 @13 float32 [] {} +0
value 14 @14 float32 [100] {1} +0
value 15 @2 float32 [100] {1} +0
value 17 @1 float32 [100] {1} +0
value 20 @15 float32 [200] {1} +0
input 1
input 2
input 3
input 4
op 0 %9 = aten.add_.Tensor(%3, 1) reads 3:0 writes 3:1 phase forward
op 1 %10 = aten.mul.Tensor(%4, %1) reads 1:0 4:0 phase forward
op 2 %16 = aten.view.default(%10, [10, 10]) phase forward
op 3 %11 = aten.empty_like.default(%10) reads 10:0 phase forward
op 4 %18 = aten.bernoulli_.float(%11, 0.5) reads 0:0 11:0 writes 0:1 11:1 random phase forward
op 5 %19 = aten.div_.Scalar(%18, 0.5) reads 11:1 writes 11:2 phase forward
op 6 %12 = aten.mul.Tensor(%10, %19) reads 10:0 11:2 phase forward
op 7 %13 = aten.mean.default(%12) reads 12:0 phase forward
op 8 %14 = aten.mul.Tensor(%19, %12) reads 11:2 12:0 phase backward
op 9 %15 = aten.mul_.Tensor(%2, 0.9) reads 2:0 writes 2:1 phase update
op 10 %20 = aten.cat.default([%15, %14]) reads 2:1 14:0 phase update
op 11 %17 = aten.add_.Tensor(%1, %15, alpha=$neg_lr) reads 1:0 2:1 writes 1:1 phase update
output 13
"""


class Bytes:
    """A cost model of plain numbers: an operator takes its id in microseconds and 10 bytes per input."""

    rounding = 1
    link_bytes_per_s = 2e9
    copy_ns = 0

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        return 1000 * op.id

    def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
        return 10 * len(op.inputs())


def step() -> Graph:
    graph = parse(STEP)
    verify(graph)
    return graph


def compiled(graph: Graph | None = None, **more: bool) -> Compiled:
    return compile_problem(step() if graph is None else graph, Bytes(), **more)


def ids(groups: tuple[tuple[Op, ...], ...]) -> list[list[int]]:
    return [[op.id for op in group] for group in groups]


def change_op(graph: Graph, op: int, **change: object) -> Graph:
    return replace(graph, ops=tuple(replace(o, **change) if o.id == op else o for o in graph.ops))  # type: ignore[arg-type]
