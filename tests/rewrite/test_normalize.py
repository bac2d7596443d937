"""In-place operators become functional where nobody can tell, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from magis.graph import Graph, parse, verify
from magis.rewrite.functionalize import functionalize
from tests.golden.golden import before_and_after, check_golden
from tests.nets import FORWARD, NETS, Block, Net, rows
from tests.oracles import captured, differences, graph_step, history, interpret, same
from tests.strategies import adversarial_orders, examples, programs, reordered

SPLIT = """magis graph 1
storage 0 generator 0
storage 1 batch 24
storage 2 temporary 24
storage 3 temporary 24
value 1 @1 float32 [2, 3] {3, 1} +0 "input:0"
value 2 @2 float32 [2, 3] {3, 1} +0
value 3 @2 float32 [2, 3] {3, 1} +0
value 4 @2 float32 [3, 2] {1, 3} +0
value 5 @2 float32 [3, 2] {1, 3} +0
value 6 @2 float32 [6] {1} +0
value 7 @3 float32 [6] {1} +0
input 1
op 0 %2 = aten.exp.default(%1) reads 1:0 phase forward module "a"
op 1 %3 = aten.relu_.default(%2) reads 2:0 writes 2:1 phase forward module "b"
op 2 %4 = aten.t.default(%3) phase forward module "b"
op 3 %5 = aten.add_.Tensor(%4, 1.5, alpha=2) reads 2:1 writes 2:2 phase forward module "c"
op 4 %6 = aten.as_strided.default(%5, [6], [1]) phase forward
op 5 %7 = aten.neg.default(%6) reads 2:2 phase forward
output 7
"""


def split() -> Graph:
    graph = parse(SPLIT)
    verify(graph)
    return graph


def test_writes_one_after_the_other_become_functional() -> None:
    after = functionalize(split())
    verify(after)
    check_golden("functionalize.txt", before_and_after(split(), after))


def test_a_wider_operand_keeps_the_write_in_place() -> None:
    """``half.mul_(float)`` is half, ``half.mul(float)`` is not; a mask makes nothing wider."""

    def run(block: nn.Module, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return block.a(x).mul_(mask.float()), block.a(x).masked_fill_(mask, 0.5)

    half = rows(3, 4, dtype=torch.bfloat16)
    net = Net(
        lambda: Block(run, a=nn.Linear(4, 4).bfloat16()), lambda: (*half(), torch.eye(3, 4).bool()),
        loss_fn=None, rule=FORWARD,
    ).build()  # fmt: skip
    graph = captured(net).graph
    after = functionalize(graph)
    assert [name for name in targets(graph) if "_." in name] == ["aten.mul_.Tensor", "aten.masked_fill_.Scalar"]
    assert [name for name in targets(after) if "_." in name] == ["aten.mul_.Tensor"]
    expected, found = interpret(graph, net), interpret(after, net)
    assert [key for key in expected if not same(expected[key], found[key])] == []


def targets(graph: Graph) -> list[str]:
    return [op.target for op in graph.ops]


def test_updates_and_persistent_memory_stay_in_place() -> None:
    graph = split()
    updated = replace(graph, ops=tuple(replace(op, phase="update") for op in graph.ops))
    assert functionalize(updated) is updated
    kept = replace(graph, storages={**graph.storages, 2: replace(graph.storages[2], kind="buffer")})
    assert functionalize(kept) is kept


@pytest.mark.parametrize("name", NETS)
def test_the_numbers_stay(name: str) -> None:
    net = NETS[name].build()
    graph = captured(net).graph
    after = functionalize(graph)
    verify(after)
    assert differences(history(graph_step(graph, net), 2), history(graph_step(after, net), 2)) == []
    assert after.inputs == graph.inputs
    assert after.outputs == graph.outputs
    assert after.persistent_bytes() == graph.persistent_bytes()


@examples(60)
@given(programs())
def test_the_numbers_of_programs_stay_in_every_order(net: Net) -> None:
    built = net.build()
    graph = captured(built).graph
    after = functionalize(graph)
    expected = interpret(graph, built)
    for order in (list(range(len(after.ops))), *adversarial_orders(after, seed=1, randoms=1)):
        verify(reordered(after, order))
        found = interpret(after, built, order)
        assert [key for key in expected if not same(expected[key], found[key])] == []
