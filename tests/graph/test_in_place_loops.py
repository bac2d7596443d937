"""Loops that write what they make over what they take, stretch by stretch: sound ones run, others are refused."""

from __future__ import annotations

import re

import pytest
import torch

from magis.graph import dump, parse, verify
from magis.graph.verify import problems
from magis.runtime.codegen import compile_step
from magis.runtime.measure import tensor_peak
from magis.simulate.simulator import replay
from tests.graph.loop_graphs import refuse

STEP = """magis graph 1
storage 1 batch 64
storage 2 temporary 64
value 1 @1 float32 [4, 4] {4, 1} +0
value 2 @2 float32 [4, 4] {4, 1} +0
value 3 @2 float32 [4, 4] {4, 1} +0
value 4 @2 float32 [4, 4] {1, 4} +0
input 1
op 0 %2 = aten.neg.default(%1) reads 1:0 phase forward
op 1 (%3) = magis.loop(%2) reads 2:0 writes 2:1 phase forward parts 2
  storage 0 outer 64
  storage 1 temporary 32
  storage 2 temporary 32
  value 0 @0 float32 [4, 4] {4, 1} +0
  value 1 @0 float32 [4, 4] {4, 1} +0
  value 2 @0 float32 [2, 4] {4, 1} +0
  value 3 @1 float32 [2, 4] {4, 1} +0
  value 4 @2 float32 [2, 4] {4, 1} +0
  input 0
  input 1
  op 0 %2 = magis.part(%0, 0) phase forward
  op 1 %3 = aten.exp.default(%2) reads 0:0 phase forward
  op 2 %4 = aten.mul.Tensor(%3, %2) reads 0:0 1:0 phase forward
  op 3 = magis.join(%1, %4, 0) reads 0:0 2:0 writes 0:1 phase forward
end
output 3
"""


def lines(*changes: tuple[str, str]) -> str:
    text = STEP
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_it_runs_in_place_and_takes_the_bytes_that_are_simulated() -> None:
    graph = parse(STEP)
    verify(graph)
    assert dump(graph) == STEP
    step, given = compile_step(graph), torch.randn(4, 4)
    (found,) = step([given.clone()], {})
    torch.testing.assert_close(found, torch.exp(-given) * -given)
    profile = replay(graph, lambda _op, _values: 0)
    assert profile.tensor_bytes == 64 + 64 + 32 + 32
    assert tensor_peak(lambda: step([given], {})) == 64 + 32 + 32


LOOP = "operator 1 (magis.loop)"
NOT_OWN = "takes memory from outside that parts write, other than its own stretch"

BROKEN = {
    "other strides": (
        lines(("op 1 (%3)", "op 1 (%4)"), ("output 3", "output 4"),
              ("  value 1 @0 float32 [4, 4] {4, 1}", "  value 1 @0 float32 [4, 4] {1, 4}")),
        f"{LOOP}: makes value 4 in place of one that it takes, but it is not all of the same",
    ),
    "memory that is not the step's own": (
        lines(("storage 2 temporary 64", "storage 2 buffer 64")),
        f"{LOOP}: makes value 3 in place of one that it takes, but it is not all of the same",
    ),
    "a write not said": (
        lines((" reads 2:0 writes 2:1 phase forward parts", " reads 2:0 phase forward parts")),
        f"{LOOP}: the body writes other storages than the loop says, [2]",
    ),
    "joined the other way": (
        lines(("magis.join(%1, %4, 0)", "magis.join(%1, %4, 1)")),
        f"{LOOP}: storage 0 of the body is written, and cut in several ways",
    ),
    "all of it read": (
        lines(("aten.exp.default(%2)", "aten.exp.default(%0)")),
        f"{LOOP}, operator 1 (aten.exp.default): {NOT_OWN}",
    ),
    "its stretch read again": (
        lines(("\nend\n", "\n  op 4 %3 = aten.exp.default(%2) reads 0:1 phase forward\nend\n")),
        f"{LOOP}, operator 4 (aten.exp.default): takes memory whose stretch has been written already",
    ),
    "a stretch with rows around it": (
        lines(("magis.join(%1, %4, 0)", "magis.join(%1, %4, 0, 1, 0)")),
        f"{LOOP}, operator 3 (magis.join): adds to memory whose stretches are read",
    ),
    "a stretch into itself": (
        lines(("magis.join(%1, %4, 0)", "magis.join(%1, %2, 0)")),
        f"{LOOP}, operator 3 (magis.join): joins a stretch of memory into itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    text, expected = BROKEN[name]
    refuse(parse(text), expected)


def test_nothing_is_a_stretch_of_nothing() -> None:
    """Even where all stretches begin at one place."""
    text = re.sub(r", 4\] {(4, 1|1, 4)}", ", 0] {0, 1}", STEP)
    verify(parse(re.sub("(batch|temporary|outer) (64|32)", r"\1 0", text)))


HALO = """magis graph 1
storage 1 batch 96
storage 2 temporary 96
value 1 @1 float32 [4, 6] {6, 1} +0
value 2 @2 float32 [4, 6] {6, 1} +0
input 1
op 0 (%2) = magis.loop(%1) reads 1:0 phase forward parts 2
  storage 0 outer 96
  storage 1 outer 96
  storage 2 temporary 72
  storage 3 temporary 72
  value 0 @0 float32 [4, 6] {6, 1} +0
  value 1 @1 float32 [4, 6] {6, 1} +0
  value 2 @2 float32 [3, 6] {6, 1} +0
  value 3 @3 float32 [3, 6] {6, 1} +0
  input 0
  input 1
  op 0 %2 = magis.part(%0, 0, 1, 0) reads 0:0 phase forward
  op 1 %3 = aten.exp.default(%2) reads 2:0 phase forward
  op 2 = magis.join(%1, %3, 0, 1, 0) reads 1:0 3:0 writes 1:1 phase forward
end
output 2
"""
OUTER = "operator 0 (magis.loop)"
PART, MERGE = f"{OUTER}, operator 0 (magis.part)", f"{OUTER}, operator 2 (magis.join)"
AROUND = {
    "of a view": ("  value 2 @2", "  value 2 @0", f"{PART}: a stretch with rows around it is a copy"),
    "of another size": (
        "  value 2 @2 float32 [3, 6]", "  value 2 @2 float32 [2, 6]",
        f"{PART}: float32(2, 6) is not one of 2 stretches of float32(4, 6) along 0 with 1 rows around it",
    ),
    "on what an operator has made": (
        "  op 2 =", "  op 3 %3 = magis.part(%0, 0, 1, 0) reads 0:0 phase forward\n  op 2 =",
        f"{OUTER}, operator 3 (magis.part): a copy of a stretch is all of a storage of its own",
    ),
    "where parts are others": (
        "parts 2", "parts 3",
        f"{PART}: float32(3, 6) is not one of 3 stretches of float32(4, 6) along 0 with 1 rows around it",
    ),
}  # fmt: skip


def test_rows_around_a_stretch_are_two_counts() -> None:
    verify(parse(HALO))
    for rows in ("1", "1, 0, 0", "0, 0", "-1, 2", "True, 0", "0.5, 0.5"):
        for number, where in ((0, PART), (2, MERGE)):
            op = ("%0, 0, 1, 0", "%1, %3, 0, 1, 0")[number > 0]
            graph = parse(HALO.replace(op, op.replace("1, 0", rows)))
            assert any(problem.startswith(f"{where}: needs ") for problem in problems(graph)), rows


@pytest.mark.parametrize("name", AROUND)
def test_a_broken_rule_of_rows_around_is_named(name: str) -> None:
    old, new, expected = AROUND[name]
    assert HALO.count(old) == 1
    refuse(parse(HALO.replace(old, new)), expected)
