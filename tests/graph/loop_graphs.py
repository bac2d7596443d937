"""A sound graph with a loop in a loop, and the ways to spoil it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from magis.errors import VerifyError
from magis.graph import Graph, GraphTextError, Loop, Op, parse, verify
from magis.graph.verify import problems

SOUND = """magis graph 1
storage 1 batch 96
storage 2 buffer 16
storage 3 temporary 16
storage 4 temporary 24
storage 5 temporary 16
value 1 @1 float32 [4, 6] {6, 1} +0 "input:0"
value 2 @2 float32 [4] {1} +0 "buffer:m"
value 3 @3 float32 [4] {1} +0
value 4 @4 float32 [6] {1} +0
value 5 @5 float32 [4] {1} +0
input 1
input 2
op 0 (%3, %4) = magis.loop(%1, %2) reads 1:0 2:0 writes 2:1 phase forward parts 2
  storage 0 outer 96
  storage 1 outer 16
  storage 2 outer 16
  storage 3 outer 24
  storage 4 temporary 48
  storage 5 temporary 8
  storage 6 temporary 24
  value 0 @0 float32 [4, 6] {6, 1} +0
  value 1 @1 float32 [4] {1} +0
  value 2 @2 float32 [4] {1} +0
  value 3 @3 float32 [6] {1} +0
  value 4 @0 float32 [2, 6] {6, 1} +0
  value 5 @4 float32 [2, 6] {6, 1} +0
  value 6 @5 float32 [2] {1} +0
  value 7 @6 float32 [6] {1} +0
  value 8 @1 float32 [2] {1} +0
  value 9 @1 float32 [2] {1} +0
  input 0
  input 1
  input 2
  input 3
  op 0 %4 = magis.part(%0, 0) phase forward
  op 1 %5 = aten.exp.default(%4) reads 0:0 phase forward
  op 2 (%6) = magis.loop(%5) reads 4:0 phase forward parts 3
    storage 0 outer 48
    storage 1 outer 8
    storage 2 temporary 16
    storage 3 temporary 8
    value 0 @0 float32 [2, 6] {6, 1} +0
    value 1 @1 float32 [2] {1} +0
    value 2 @2 float32 [2, 2] {2, 1} +0
    value 3 @3 float32 [2] {1} +0
    input 0
    input 1
    op 0 %2 = magis.part(%0, 1) reads 0:0 phase forward
    op 1 %3 = aten.sum.dim_IntList(%2, [1]) reads 2:0 phase forward
    op 2 = magis.reduce(%1, %3, "sum") reads 1:0 3:0 writes 1:1 phase forward
  end
  op 3 = magis.join(%2, %6, 0) reads 2:0 5:0 writes 2:1 phase forward
  op 4 %7 = aten.sum.dim_IntList(%5, [0]) reads 4:0 phase forward
  op 5 = magis.reduce(%3, %7, "sum") reads 3:0 6:0 writes 3:1 phase forward
  op 6 %8 = magis.part(%1, 0) phase forward
  op 7 %9 = aten.mul_.Scalar(%8, 0.5) reads 1:0 writes 1:1 phase forward
end
op 1 %5 = aten.neg.default(%3) reads 3:0 phase forward
output 5
output 4
"""

Spoil = Callable[[Graph], Graph]


def sound() -> Graph:
    return parse(SOUND)


def change_op(graph: Graph, at: int, **change: object) -> Graph:
    ops = (*graph.ops[:at], replace(graph.ops[at], **change), *graph.ops[at + 1 :])  # type: ignore[arg-type]
    return replace(graph, ops=ops)


def body_of(graph: Graph, at: int) -> Graph:
    body = graph.ops[at].body
    assert body is not None
    return body.graph


def within(*spoils: Spoil, at: int = 0) -> Spoil:
    """The same for the body of the operator at a position."""

    def spoiled(graph: Graph) -> Graph:
        body = graph.ops[at].body
        assert body is not None
        return change_op(graph, at, body=replace(body, graph=both(*spoils)(body.graph)))

    return spoiled


def inner(*spoils: Spoil) -> Spoil:
    """The same for the innermost body."""
    return within(within(*spoils, at=2))


def op(at: int, **change: object) -> Spoil:
    return lambda graph: change_op(graph, at, **change)


def value(key: int, **change: object) -> Spoil:
    return _described("values", key, change)


def storage(key: int, **change: object) -> Spoil:
    return _described("storages", key, change)


def _described(table: str, key: int, change: dict[str, object]) -> Spoil:
    def spoiled(graph: Graph) -> Graph:
        known = getattr(graph, table)
        return replace(graph, **{table: {**known, key: replace(known[key], **change)}})

    return spoiled


def both(*spoils: Spoil) -> Spoil:
    def spoiled(graph: Graph) -> Graph:
        for spoil in spoils:
            graph = spoil(graph)
        return graph

    return spoiled


def parts(count: int, at: int = 0) -> Spoil:
    return lambda graph: change_op(graph, at, body=Loop(count, body_of(graph, at)))


def added(*ops: Op) -> Spoil:
    """Operators behind all others."""
    return lambda graph: replace(graph, ops=(*graph.ops, *ops))


def without(at: int) -> Spoil:
    return lambda graph: replace(graph, ops=(*graph.ops[:at], *graph.ops[at + 1 :]))


def one_line(text: str) -> str:
    """The one line with which the text is refused, "sound" if it is not."""
    message = "sound"
    try:
        verify(parse(text))
    except (GraphTextError, VerifyError) as error:
        message = str(error)
    assert message.splitlines() == [message]
    return message


def refuse(graph: Graph, message: str) -> None:
    """Check that the line is among those of the broken rules, and that the first of these is the error."""
    found = list(problems(graph))
    assert message in found
    with pytest.raises(VerifyError) as caught:
        verify(graph)
    assert str(caught.value) == " ".join(found[0].split())
    assert "\n" not in str(caught.value)


def named(mistakes: Mapping[str, Mapping[str, Spoil]]) -> list[Any]:
    """Each mistake with what is said of it, for `parametrize`."""
    return [
        pytest.param(spoil, message, id=name) for message, spoils in mistakes.items() for name, spoil in spoils.items()
    ]
