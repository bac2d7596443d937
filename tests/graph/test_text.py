"""The text form of graphs: complete, readable back, and safe to read from anywhere."""

from __future__ import annotations

import random
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


# --- hostile texts ----------------------------------------------------------------------------------------------------


def survive(text: str) -> None:
    """Either a graph or one line."""
    try:
        parse(text)
    except GraphTextError as error:
        assert "\n" not in str(error)  # noqa: PT017  (both outcomes are fine)


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
