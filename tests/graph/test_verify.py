"""Every rule of ``verify`` refuses a graph that breaks it, and sound graphs pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from magis.errors import VerifyError
from magis.graph import Graph, GraphTextError, Op, Ref, Storage, Value, dump, parse, verify
from magis.graph.verify import problems
from tests.strategies import schedules, written_graphs

SOUND = """magis graph 1
storage 0 generator 0
storage 1 parameter 16
storage 2 batch 16
storage 3 temporary 16
storage 4 temporary 16
storage 5 host 16
storage 6 temporary 16
storage 7 constant 4
value 0 @1 float32 [4] {1} +0 "parameter:w"
value 1 @2 float32 [2, 2] {2, 1} +0 "input:0"
value 2 @3 float32 [4] {1} +0
value 3 @3 float32 [2, 1] {2, 0} +1
value 4 @3 float32 [4] {1} +0
value 5 @4 float32 [4] {1} +0
value 6 @5 float32 [4] {1} +0
value 7 @6 float32 [4] {1} +0
value 8 @1 float32 [4] {1} +0
value 9 @7 float32 [] {} +0 "constant:0"
constant 9 [0.5]
input 0
input 1
input 9
op 0 %2 = aten.mul.Tensor(%0, %1) reads 1:0 2:0 phase forward
op 1 %3 = aten.as_strided.default(%2, [2, 1], [2, 0], 1) phase forward
op 2 %4 = aten.bernoulli_.float(%2, 0.5) reads 0:0 3:0 writes 0:1 3:1 random phase forward
op 3 %5 = aten.neg.default(%4) reads 3:1 phase forward
op 4 %6 = magis.store(%4) reads 3:1 phase forward
op 5 = magis.wait(%4, %6) phase forward
op 6 %7 = magis.load(%6) phase forward
op 7 %8 = aten.add_.Tensor(%0, %7) reads 1:0 6:0 writes 1:1 phase update
output 5
"""


OVERWRITE = Op(9, "aten.zero_.default", (Ref(4),), (), (4,), reads=((3, 1),), writes=((3, 2),))


def sound() -> Graph:
    return parse(SOUND)


def change_value(graph: Graph, key: int, **change: object) -> Graph:
    return replace(graph, values={**graph.values, key: replace(graph.values[key], **change)})  # type: ignore[arg-type]


def change_op(graph: Graph, at: int, **change: object) -> Graph:
    ops = (*graph.ops[:at], replace(graph.ops[at], **change), *graph.ops[at + 1 :])  # type: ignore[arg-type]
    return replace(graph, ops=ops)


def swap(graph: Graph, first: int, second: int) -> Graph:
    ops = list(graph.ops)
    ops[first], ops[second] = ops[second], ops[first]
    return replace(graph, ops=tuple(ops))


def without(graph: Graph, table: str, key: int) -> Graph:
    return replace(graph, **{table: {k: v for k, v in getattr(graph, table).items() if k != key}})


BROKEN: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "storage filed wrongly": (
        lambda g: replace(g, storages={**g.storages, 4: Storage(99, 16, "temporary")}),
        "storage 4 is filed under another id than its own, 99",
    ),
    "storage of unknown kind": (
        lambda g: replace(g, storages={**g.storages, 4: Storage(4, 16, "tape")}),
        "storage 4 is of kind 'tape' and has 16 bytes",
    ),
    "negative storage": (
        lambda g: replace(g, storages={**g.storages, 8: Storage(8, -1, "temporary")}),
        "storage 8 is of kind 'temporary' and has -1 bytes",
    ),
    "constant without input": (
        lambda g: replace(g, constants={5: (1.0,) * 4, 9: (1.0,)}),
        "the data of constant 5 belongs to no input",
    ),
    "constant without value": (
        lambda g: replace(g, constants={77: (1.0,)}, inputs=(*g.inputs, 77)),
        "the data of constant 77 belongs to no input",
    ),
    "constant of wrong size": (
        lambda g: replace(g, constants={9: (1.0, 2.0)}),
        "constant 9 has 1 elements, its data 2",
    ),
    "value filed wrongly": (
        lambda g: change_value(g, 5, id=99),
        "value 5 is filed under another id than its own, 99",
    ),
    "value on no storage": (
        lambda g: change_value(g, 5, storage=99),
        "value 5 lies on storage 99, which does not exist",
    ),
    "unknown data type": (
        lambda g: change_value(g, 5, dtype="float13"),
        "value 5 has unknown data type 'float13'",
    ),
    "ranks differ": (lambda g: change_value(g, 5, stride=()), "value 5 has shape (4,), stride (), offset 0"),
    "negative size": (lambda g: change_value(g, 5, shape=(-4,)), "value 5 has shape (-4,), stride (1,), offset 0"),
    "negative step": (lambda g: change_value(g, 5, stride=(-1,)), "value 5 has shape (4,), stride (-1,), offset 0"),
    "negative offset": (lambda g: change_value(g, 5, offset=-1), "value 5 has shape (4,), stride (1,), offset -1"),
    "too long": (lambda g: change_value(g, 5, shape=(5,)), "value 5 reaches to byte 20 of storage 4, which has 16"),
    "too wide": (lambda g: change_value(g, 3, stride=(3, 0)), "value 3 reaches to byte 20 of storage 3, which has 16"),
    "too far": (lambda g: change_value(g, 3, offset=2), "value 3 reaches to byte 20 of storage 3, which has 16"),
    "items too large": (
        lambda g: change_value(g, 5, dtype="float64"),
        "value 5 reaches to byte 32 of storage 4, which has 16",
    ),
    "input not described": (
        lambda g: replace(g, inputs=(*g.inputs, 99)),
        "the step takes value 99, which is not described",
    ),
    "id twice": (lambda g: change_op(g, 3, id=2), "operator 2 (aten.neg.default): the id occurs twice"),
    "input not made yet": (
        lambda g: swap(g, 2, 3),
        "operator 3 (aten.neg.default): takes value 4, which nothing has made yet",
    ),
    "input of a list not made": (
        lambda g: change_op(g, 3, args=((Ref(4), (Ref(7),)),)),
        "operator 3 (aten.neg.default): takes value 7, which nothing has made yet",
    ),
    "named input not made": (
        lambda g: change_op(g, 3, kwargs=(("out", Ref(7)),)),
        "operator 3 (aten.neg.default): takes value 7, which nothing has made yet",
    ),
    "freed input": (
        lambda g: change_op(g, 7, args=(Ref(0), Ref(2))),
        "operator 7 (aten.add_.Tensor): takes value 2, whose memory was freed after swapping it out",
    ),
    "old contents": (
        lambda g: change_op(g, 3, reads=((3, 0),)),
        "operator 3 (aten.neg.default): reads version 0 of storage 3, which is at 1",
    ),
    "contents to come": (
        lambda g: change_op(g, 3, reads=((3, 2),)),
        "operator 3 (aten.neg.default): reads version 2 of storage 3, which is at 1",
    ),
    "unknown contents": (
        lambda g: change_op(g, 3, reads=((99, 0),)),
        "operator 3 (aten.neg.default): reads version 0 of storage 99, which is at None",
    ),
    "skipped write": (
        lambda g: change_op(g, 7, writes=((1, 2),)),
        "operator 7 (aten.add_.Tensor): writes version 2 of storage 1, which is at 0",
    ),
    "write again": (
        lambda g: change_op(g, 7, writes=((3, 1),)),
        "operator 7 (aten.add_.Tensor): writes version 1 of storage 3, which is at 1",
    ),
    "random numbers out of order": (
        lambda g: change_op(g, 2, reads=((0, 1), (3, 0))),
        "operator 2 (aten.bernoulli_.float): reads version 1 of storage 0, which is at 0",
    ),
    "version not said": (
        lambda g: change_op(g, 3, reads=()),
        "operator 3 (aten.neg.default): takes a value on storage 3 without saying which version it reads",
    ),
    "version of one of two not said": (
        lambda g: change_op(g, 0, reads=((1, 0),)),
        "operator 0 (aten.mul.Tensor): takes a value on storage 2 without saying which version it reads",
    ),
    "writer that says nothing": (
        lambda g: change_op(g, 7, reads=((6, 0),)),
        "operator 7 (aten.add_.Tensor): takes a value on storage 1 without saying which version it reads",
    ),
    "store that says nothing": (
        lambda g: change_op(g, 4, reads=()),
        "operator 4 (magis.store): takes a value on storage 3 without saying which version it reads",
    ),
    "store that nothing waits for": (
        lambda g: replace(g, ops=(*g.ops[:5], *g.ops[6:])),
        "operator 4 (magis.store): nothing waits for the copy, so its memory may be used again too early",
    ),
    "written while it is copied": (
        lambda g: replace(g, ops=(*g.ops[:5], OVERWRITE, *g.ops[5:])),
        "operator 9 (aten.zero_.default): writes storage 3, which is being copied to the host",
    ),
    "made twice": (
        lambda g: change_op(g, 6, outputs=(2,)),
        "operator 6 (magis.load): makes value 2, which exists already",
    ),
    "made again from an input": (
        lambda g: change_op(g, 6, outputs=(0,)),
        "operator 6 (magis.load): makes value 0, which exists already",
    ),
    "made but not described": (
        lambda g: change_op(without(g, "values", 7), 6, outputs=(7,)),
        "operator 6 (magis.load): makes value 7, which is not described",
    ),
    "returned but not made": (
        lambda g: replace(g, outputs=(5, 99)),
        "the step returns value 99, which nothing makes",
    ),
    "returned but freed": (
        lambda g: replace(g, outputs=(4,)),
        "the step returns value 4, whose memory was freed after swapping it out",
    ),
}


def test_sound_graphs_pass() -> None:
    verify(sound())


@given(schedules())
def test_made_up_sound_graphs_pass(graph: Graph) -> None:
    assert list(problems(graph)) == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    spoil, message = BROKEN[name]
    graph = spoil(sound())
    assert message in list(problems(graph))
    with pytest.raises(VerifyError) as caught:
        verify(graph)
    assert str(caught.value) == next(problems(graph))
    assert "\n" not in str(caught.value)


def test_one_tensor_may_be_returned_twice() -> None:
    verify(change_op(sound(), 3, outputs=(5, 5), many=True))


def test_a_window_may_end_where_its_storage_does() -> None:
    verify(change_value(sound(), 3, shape=(3, 1), stride=(1, 0)))
    verify(change_value(sound(), 3, shape=(0, 9), stride=(99, 1)))  # no elements, nowhere


def test_every_operator_before_its_input_is_refused() -> None:
    """All pairs of neighbours that depend on each other, swapped."""
    refused = [at for at in range(7) if list(problems(swap(sound(), at, at + 1)))]
    assert refused == [0, 2, 4, 6]  # the others: a view and a write, two readers, wait and load


@given(written_graphs())
def test_any_graph_is_sound_or_refused_in_one_line(graph: Graph) -> None:
    try:
        verify(graph)
    except VerifyError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017  (both outcomes are fine)


def test_a_damaged_text_is_sound_or_refused_in_one_line() -> None:
    lines = SOUND.splitlines()
    for gone in range(1, len(lines)):
        text = "\n".join([*lines[:gone], *lines[gone + 1 :]])
        try:
            verify(parse(text))
        except (GraphTextError, VerifyError) as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017  (both outcomes are fine)
    assert parse(dump(sound())) == sound()


def test_waiting_for_nothing_is_no_crash() -> None:
    graph = sound()
    ops = (*graph.ops, Op(8, "magis.wait", (), (), ()), Op(9, "magis.wait", (Ref(55),), (), ()))
    values = {**graph.values, 55: Value(55, (), (), "float32", 6)}
    assert list(problems(replace(graph, ops=ops, values=values))) == [
        "operator 9 (magis.wait): takes value 55, which nothing has made yet"
    ]
