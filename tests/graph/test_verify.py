"""Every rule of ``verify`` refuses a graph that breaks it, and sound graphs pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from magis.graph import Graph, Op, Ref, Storage, Value, dump, parse, verify
from magis.graph.verify import problems
from tests.graph.loop_graphs import Spoil, both, named, one_line, op, refuse, value
from tests.strategies import schedules

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


NEG, STORE = "operator 3 (aten.neg.default)", "operator 4 (magis.store)"
LOAD, ADD = "operator 6 (magis.load)", "operator 7 (aten.add_.Tensor)"
OVERWRITE = Op(9, "aten.zero_.default", (Ref(4),), (), (4,), reads=((3, 1),), writes=((3, 2),))


def sound() -> Graph:
    return parse(SOUND)


def swap(graph: Graph, first: int, second: int) -> Graph:
    ops = list(graph.ops)
    ops[first], ops[second] = ops[second], ops[first]
    return replace(graph, ops=tuple(ops))


BROKEN: dict[str, dict[str, Spoil]] = {
    "storage 4 is filed under another id than its own, 99": {
        "storage filed wrongly": lambda g: replace(g, storages={**g.storages, 4: Storage(99, 16, "temporary")})
    },
    "storage 4 is of kind 'tape' and has 16 bytes": {
        "storage of unknown kind": lambda g: replace(g, storages={**g.storages, 4: Storage(4, 16, "tape")})
    },
    "storage 8 is of kind 'temporary' and has -1 bytes": {
        "negative storage": lambda g: replace(g, storages={**g.storages, 8: Storage(8, -1, "temporary")})
    },
    "the data of constant 5 belongs to no input": {
        "constant without input": lambda g: replace(g, constants={5: (1.0,) * 4, 9: (1.0,)})
    },
    "the data of constant 77 belongs to no input": {
        "constant without value": lambda g: replace(g, constants={77: (1.0,)}, inputs=(*g.inputs, 77))
    },
    "constant 9 has 1 elements, its data 2": {
        "constant of wrong size": lambda g: replace(g, constants={9: (1.0, 2.0)})
    },
    "value 5 is filed under another id than its own, 99": {"value filed wrongly": value(5, id=99)},
    "value 5 lies on storage 99, which does not exist": {"value on no storage": value(5, storage=99)},
    "value 5 has unknown data type 'float13'": {"unknown data type": value(5, dtype="float13")},
    "value 5 has shape (4,), stride (), offset 0": {"ranks differ": value(5, stride=())},
    "value 5 has shape (-4,), stride (1,), offset 0": {"negative size": value(5, shape=(-4,))},
    "value 5 has shape (4,), stride (-1,), offset 0": {"negative step": value(5, stride=(-1,))},
    "value 5 has shape (4,), stride (1,), offset -1": {"negative offset": value(5, offset=-1)},
    "value 5 reaches to byte 20 of storage 4, which has 16": {"too long": value(5, shape=(5,))},
    "value 3 reaches to byte 20 of storage 3, which has 16": {
        "too wide": value(3, stride=(3, 0)),
        "too far": value(3, offset=2),
    },
    "value 5 reaches to byte 32 of storage 4, which has 16": {"items too large": value(5, dtype="float64")},
    "the step takes value 99, which is not described": {
        "input not described": lambda g: replace(g, inputs=(*g.inputs, 99))
    },
    "operator 2 (aten.neg.default): the id occurs twice": {"id twice": op(3, id=2)},
    f"{NEG}: takes value 4, which nothing has made yet": {"input not made yet": lambda g: swap(g, 2, 3)},
    f"{NEG}: takes value 7, which nothing has made yet": {
        "input of a list not made": op(3, args=((Ref(4), (Ref(7),)),)),
        "named input not made": op(3, kwargs=(("out", Ref(7)),)),
    },
    f"{ADD}: takes value 2, whose memory was freed after swapping it out": {
        "freed input": op(7, args=(Ref(0), Ref(2)))
    },
    f"{NEG}: reads version 0 of storage 3, which is at 1": {"old contents": op(3, reads=((3, 0),))},
    f"{NEG}: reads version 2 of storage 3, which is at 1": {"contents to come": op(3, reads=((3, 2),))},
    f"{NEG}: reads version 0 of storage 99, which is at None": {"unknown contents": op(3, reads=((99, 0),))},
    f"{ADD}: writes version 2 of storage 1, which is at 0": {"skipped write": op(7, writes=((1, 2),))},
    f"{ADD}: writes version 1 of storage 3, which is at 1": {"write again": op(7, writes=((3, 1),))},
    "operator 2 (aten.bernoulli_.float): reads version 1 of storage 0, which is at 0": {
        "random numbers out of order": op(2, reads=((0, 1), (3, 0)))
    },
    f"{NEG}: takes a value on storage 3 without saying which version it reads": {"version not said": op(3, reads=())},
    "operator 0 (aten.mul.Tensor): takes a value on storage 2 without saying which version it reads": {
        "version of one of two not said": op(0, reads=((1, 0),))
    },
    f"{ADD}: takes a value on storage 1 without saying which version it reads": {
        "writer that says nothing": op(7, reads=((6, 0),))
    },
    f"{STORE}: takes a value on storage 3 without saying which version it reads": {
        "store that says nothing": op(4, reads=())
    },
    f"{STORE}: nothing waits for the copy, so its memory may be used again too early": {
        "store that nothing waits for": lambda g: replace(g, ops=(*g.ops[:5], *g.ops[6:]))
    },
    f"{LOAD}: loads what nothing has waited for, so its copy to the host may not be there yet": {
        "loaded while it is copied": lambda g: replace(g, ops=(*g.ops[:5], g.ops[6], g.ops[5], *g.ops[7:]))
    },
    "operator 9 (aten.zero_.default): writes storage 3, which is being copied to the host": {
        "written while it is copied": lambda g: replace(g, ops=(*g.ops[:5], OVERWRITE, *g.ops[5:]))
    },
    f"{LOAD}: makes value 2, which exists already": {"made twice": op(6, outputs=(2,))},
    f"{LOAD}: makes value 0, which exists already": {"made again from an input": op(6, outputs=(0,))},
    f"{LOAD}: makes value 7, which is not described": {
        "made but not described": both(
            lambda g: replace(g, values={k: v for k, v in g.values.items() if k != 7}), op(6, outputs=(7,))
        )
    },
    "the step returns value 99, which nothing makes": {"returned but not made": lambda g: replace(g, outputs=(5, 99))},
    "the step returns value 4, whose memory was freed after swapping it out": {
        "returned but freed": lambda g: replace(g, outputs=(4,))
    },
}
"""What is said -> mistakes of which it is said."""


def test_sound_graphs_pass() -> None:
    verify(sound())


@given(schedules())
def test_made_up_sound_graphs_pass(graph: Graph) -> None:
    assert list(problems(graph)) == []


@pytest.mark.parametrize(("spoil", "message"), named(BROKEN))
def test_a_broken_rule_is_named(spoil: Spoil, message: str) -> None:
    refuse(spoil(sound()), message)


def test_one_tensor_may_be_returned_twice() -> None:
    verify(op(3, outputs=(5, 5), many=True)(sound()))


def test_a_window_may_end_where_its_storage_does() -> None:
    verify(value(3, shape=(3, 1), stride=(1, 0))(sound()))
    verify(value(3, shape=(0, 9), stride=(99, 1))(sound()))  # no elements, nowhere


def test_every_operator_before_its_input_is_refused() -> None:
    """All pairs of neighbours that depend on each other, swapped."""
    refused = [at for at in range(7) if list(problems(swap(sound(), at, at + 1)))]
    assert refused == [0, 2, 4, 5, 6]  # the others: a view and a write, two readers


def test_a_damaged_text_is_sound_or_refused_in_one_line() -> None:
    lines = SOUND.splitlines()
    for gone in range(1, len(lines)):
        assert one_line("\n".join([*lines[:gone], *lines[gone + 1 :]]))
    assert parse(dump(sound())) == sound()


def test_waiting_for_nothing_is_no_crash() -> None:
    graph = sound()
    waits = [Op(8 + at, "magis.wait", args, (), ()) for at, args in enumerate([(), (Ref(55),), (Ref(99),)])]
    values = {**graph.values, 55: Value(55, (), (), "float32", 6)}
    assert list(problems(replace(graph, ops=(*graph.ops, *waits), values=values))) == [
        "operator 9 (magis.wait): takes value 55, which nothing has made yet",
        "operator 10 (magis.wait): takes value 99, which nothing has made yet",
    ]


# --- messages that are under way while others run ---------------------------------------------------------------------

SENT = """magis graph 1
storage 1 parameter 16
storage 2 temporary 16
storage 3 temporary 16
storage 4 temporary 16
storage 5 temporary 16
value 0 @1 float32 [4] {1} +0 "parameter:w"
value 1 @2 float32 [4] {1} +0
value 2 @3 float32 [4] {1} +0
value 3 @3 float32 [2, 2] {2, 1} +0
value 4 @4 float32 [4] {1} +0
value 5 @5 float32 [4] {1} +0
input 0
op 0 %1 = aten.neg.default(%0) reads 1:0 phase forward
op 1 %2 = _c10d_functional.all_reduce.default(%1, "sum", "dp") reads 2:0 phase forward
op 2 %3 = aten.view.default(%2, [2, 2]) phase forward
op 3 %4 = aten.exp.default(%1) reads 2:0 phase forward
op 4 = magis.arrived(%2, %1) reads 2:0 3:0 phase forward
op 5 %5 = aten.neg.default(%3) reads 3:0 phase forward
output 5
"""
EARLY = "operator 3 (aten.exp.default): uses memory of the message that brings value 2, which is still under way"
ARRIVES = "operator 4 (magis.arrived)"
LOST = "the message that brings value 2 is not waited for where it was sent last"
UNSENT: dict[str, dict[str, Spoil]] = {
    EARLY: {
        "read too early": op(3, args=(Ref(2),), reads=((3, 0),)),
        "read through a view": op(3, args=(Ref(3),), reads=((3, 0),)),
        "overwritten": op(3, args=(Ref(2),), reads=((3, 0),), writes=((3, 1),), outputs=(2,)),
        "overwritten while it is sent": op(3, writes=((2, 1),), outputs=()),
        "overwritten through nothing": op(3, args=(), reads=(), writes=((3, 1),), outputs=()),
    },
    f"{ARRIVES}: waits for value 2, which no message brings": {
        "waited for before it is sent": lambda g: replace(g, ops=(g.ops[0], g.ops[4], *g.ops[1:4], g.ops[5])),
        "no message": op(1, target="aten.neg.default"),
    },
    "operator 6 (magis.arrived): waits for value None, which no message brings": {
        "waited for nothing": lambda g: replace(g, ops=(*g.ops, replace(g.ops[4], id=6, args=(), reads=())))
    },
    "operator 6 (magis.arrived): waits for value 2, which no message brings": {
        "waited for twice": lambda g: replace(g, ops=(*g.ops, replace(g.ops[4], id=6)))
    },
    f"{ARRIVES}: names (0,) as sent by the message that brings value 2, which sends (1,)": {
        "another tensor named": op(4, args=(Ref(2), Ref(0)), reads=((1, 0), (3, 0)))
    },
    LOST: {"not waited for again": lambda g: replace(g, ops=(*g.ops, replace(g.ops[1], id=6)))},
}


def test_what_is_sent_may_be_read_and_what_arrives_looked_at() -> None:
    verify(parse(SENT))


@pytest.mark.parametrize(("spoil", "message"), named(UNSENT))
def test_memory_of_messages_is_left_alone(spoil: Spoil, message: str) -> None:
    assert message in list(problems(spoil(parse(SENT))))
