"""The text form of graphs: complete, readable back, and safe to read from anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.graph import Const, Graph, GraphTextError, Op, Ref, Scalar, Storage, Value, digest, dump, parse
from tests.nets import NETS
from tests.oracles import captured
from tests.strategies import examples, written_graphs, written_ops

HEADER = "magis graph 1\n"


@pytest.mark.parametrize("name", ["tied", "batch-norm", "dropout", "attention-explicit", "slice-writes", "constants"])
def test_captured_graphs_read_back(name: str) -> None:
    graph = captured(NETS[name].build()).graph
    assert parse(dump(graph)) == graph


def test_the_form_is_the_documented_one() -> None:
    graph = Graph(
        storages={3: Storage(3, 1024, "parameter")},
        values={5: Value(5, (16, 16), (16, 1), "float32", 3, 0, "parameter:weight"), 9: Value(9, (), (), "bool", 3, 7)},
        ops=(
            Op(
                0, "aten.mm.default", (Ref(7), 0.5, (1, None, "a b")),
                (("dtype", Const("dtype", "float32")), ("lr", Scalar("neg_lr"))), (40, None), many=True,
                reads=((2, 0), (3, 1)), writes=((3, 2),), random=True, module="layers.0", origin=4,
            ),
        ),
        inputs=(5,), outputs=(40,), constants={9: (0.5, True)},
    )  # fmt: skip
    assert dump(graph) == (
        "magis graph 1\n"
        "storage 3 parameter 1024\n"
        'value 5 @3 float32 [16, 16] {16, 1} +0 "parameter:weight"\n'
        "value 9 @3 bool [] {} +7\n"
        "constant 9 [0.5, True]\n"
        "input 5\n"
        'op 0 (%40, _) = aten.mm.default(%7, 0.5, [1, None, "a b"], dtype=<dtype float32>, lr=$neg_lr) '
        'reads 2:0 3:1 writes 3:2 random phase forward module "layers.0" origin 4\n'
        "output 40\n"
    )


@examples(40)
@given(written_graphs(), st.data())
def test_the_digest_sees_every_change(graph: Graph, data: st.DataObject) -> None:
    """Whatever part changes, be it the last field of an operator, the digest does."""
    ops = [*graph.ops, data.draw(written_ops())]
    base = replace(graph, ops=tuple(ops))
    at = data.draw(st.integers(0, len(ops) - 1))
    field = data.draw(st.sampled_from([field.name for field in fields(Op) if field.init]))
    donor = data.draw(written_ops())
    changed = replace(base, ops=(*ops[:at], replace(ops[at], **{field: getattr(donor, field)}), *ops[at + 1 :]))
    assert (digest(changed) == digest(base)) == (changed == base)
    assert len(digest(base)) == 16


@pytest.mark.parametrize(
    "change",
    [
        lambda g: replace(g, inputs=(*g.inputs, 0)),
        lambda g: replace(g, outputs=()),
        lambda g: replace(g, constants={0: (1.0,)}),
        lambda g: replace(g, storages={**g.storages, 1: replace(g.storages[1], nbytes=1)}),
        lambda g: replace(g, storages={**g.storages, 1: replace(g.storages[1], kind="buffer")}),
        *(
            lambda g, key=key, new=new: replace(g, values={**g.values, 0: replace(g.values[0], **{key: new})})
            for key, new in [
                ("shape", (1,)), ("stride", (2, 2)), ("dtype", "int8"), ("storage", 0), ("offset", 1), ("name", "")
            ]
        ),
        lambda g: replace(g, ops=g.ops[::-1]),
    ],
)  # fmt: skip
def test_the_digest_sees_changes_outside_of_operators(change: Callable[[Graph], Graph]) -> None:
    graph = captured(NETS["linear"].build()).graph
    assert digest(graph) == digest(captured(NETS["linear"].build()).graph)
    assert digest(change(graph)) != digest(graph)


# --- hostile texts ----------------------------------------------------------------------------------------------------


def refuse(text: str) -> str:
    """The one line with which the text is refused."""
    with pytest.raises(GraphTextError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def survive(text: str) -> None:
    """Either a graph or one line."""
    try:
        parse(text)
    except GraphTextError as error:
        assert "\n" not in str(error)  # noqa: PT017  (both outcomes are fine)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense 1", "line 2 of the graph: unknown entry 'nonsense'"),
        ("storage 1 parameter", "ends too early"),
        ("storage 1 parameter 4 5", "unexpected '5' at the end"),
        ("storage x parameter 4", "expected a whole number, found 'x'"),
        ("storage 1 parameter 4.5", "expected a whole number"),
        ("storage 1 parameter 1" + 30 * "0", "expected a whole number"),
        ("storage 1 parameter " + 10_000 * "9", "expected a whole number"),
        ("input --5", "unexpected '--5'"),
        ("input ²", "unexpected '²'"),
        ("input \u0661", "unexpected"),
        ("storage 1 parameter 4\nstorage 1 parameter 4", "line 3 of the graph: 1 is described twice"),
        ("value 1 @3 float32 [] {} +0\nvalue 1 @3 float32 [] {} +0", "line 3 of the graph: 1 is described twice"),
        ("constant 1 [1]\nconstant 1 [1]", "line 3 of the graph: 1 is described twice"),
        ('value 1 @3 float32 [] {} +0 "\\ud800"', "line 2 of the graph: 'utf-8' codec can't encode"),
        ("value 1 3 float32 [] {} +0", "expected '@'"),
        ("value 1 @3 float32 [1, 2 {} +0", "expected a whole number, found '{'"),
        ("value 1 @3 float32 [] {} +0 unquoted", "expected a quoted name"),
        ('value 1 @3 float32 [] {} +0 "\\x"', "line 2 of the graph"),
        ('value 1 @3 float32 [] {} +0 "open', """unexpected '"open'"""),
        ("constant 1 0.5", "a constant is a list of numbers"),
        ('constant 1 ["a"]', "a constant is a list of numbers"),
        ("constant 1 [[1]]", "a constant is a list of numbers"),
        ("op 0 %1 = aten.f.default(", "ends too early"),
        ("op 0 1 = aten.f.default()", "expected a value such as %5, found '1'"),
        ("op 0 %1 = aten.f.default(~) phase forward", "unexpected"),
        ("op 0 %1 = aten.f.default(foo) phase forward", "unexpected 'foo'"),
        ("op 0 %1 = aten.f.default() sings", "unknown fact 'sings'"),
        ('op 0 %1 = "os"()', "expected an operator, found '\"os\"'"),
        ("op 0 %1 = aten.5.default()", "expected an operator, found 'aten.5.default'"),
        ("op 0 %1 = aten.f.default(5=1)", "expected a name, found '5'"),
        ('op 0 %1 = aten.f.default("a"=1)', "expected a name"),
        ("op 0 %1 = aten.f.default(a.b=1)", "expected a name, found 'a.b'"),
        ("op 0 %1 = aten.f.default() phase (", "expected a name, found '('"),
        ("storage 1 [ 4", "expected a name, found '['"),
        ("op 0 %1 = aten.f.default() reads 1", "ends too early"),
        ("op 0 %1 = aten.f.default() origin", "ends too early"),
        ("op 0 %1 = aten.f.default() module 5", "expected a quoted name"),
        ("op 0 %1 = aten.f.default(%" + 10_000 * "9" + ")", "line 2 of the graph"),
        ("op 0 %" + 10_000 * "9" + " = aten.f.default()", "line 2 of the graph"),
        ("op 0 %1 = aten.f.default(" + 10_000 * "9" + ")", "line 2 of the graph"),
        ("op 0 %1 = aten.f.default(" + 1000 * "[" + ")", "nested more than 20 deep"),
        ("op 0 %1 = aten.f.default(" + 100_000 * "[" + 100_000 * "]" + ")", "nested more than 20 deep"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str) -> None:
    assert message in refuse(HEADER + line + "\n")


@given(st.text(max_size=200))
def test_any_text_is_a_graph_or_one_line(text: str) -> None:
    survive(text)
    survive(HEADER + text)


def test_damaged_graphs_are_graphs_or_one_line() -> None:
    text = dump(captured(NETS["batch-norm"].build()).graph)
    rng = random.Random(0)
    for cut in rng.sample(range(len(text)), 60):
        survive(text[:cut])
    for _ in range(150):
        at, end = sorted(rng.sample(range(len(text)), 2))
        damage = rng.choice(["", "%", "[", "]", "(", ")", '"', "\\", "9" * 30, "-", ":", "\x00", "é", "nan", "_", "\n"])
        survive(text[:at] + damage + text[at + rng.choice([0, 1, min(end - at, 9)]) :])
