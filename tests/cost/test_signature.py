"""Signatures say all that a cost depends on, nothing else, and read back as written."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from magis.cost.signature import parse, signature
from magis.graph.nodes import BITS, ITEM_SIZE, Arg, Const, Op, Ref, Scalar, Value
from tests.strategies import examples

SIZES = st.integers(0, 300)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Op, dict[int, Value]]:
    """Any call: tensors of any layout, nested lists, literals, constants, run-time scalars."""
    ranks = draw(st.lists(st.integers(0, 4), max_size=4))
    values = {}
    for number, rank in enumerate(ranks, start=draw(st.integers(0, 50))):
        shape = tuple(draw(st.lists(SIZES, min_size=rank, max_size=rank)))
        stride = tuple(draw(st.lists(SIZES, min_size=rank, max_size=rank)))
        dtype = draw(st.sampled_from(sorted(ITEM_SIZE)))
        bits = draw(st.sampled_from([(), BITS[:1], BITS[1:], BITS]))
        values[number] = Value(number, shape, stride, dtype, number, draw(SIZES), bits=bits)
    leaves: st.SearchStrategy[Arg] = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=8),
        st.builds(Scalar, st.text(min_size=1, max_size=4)),
        st.builds(Const, st.sampled_from(("dtype", "layout", "memory_format")), st.just("float32")),
        st.just(Const("device", "cpu")),
        *([st.sampled_from([Ref(number) for number in values])] if values else []),
    )
    args = st.recursive(leaves, lambda items: st.lists(items, max_size=3).map(tuple), max_leaves=6)
    names = st.text(string.ascii_letters + "_", min_size=1, max_size=6)
    kwargs = draw(st.dictionaries(names, args, max_size=3))
    return Op(7, "aten.some_op.default", tuple(draw(st.lists(args, max_size=4))), tuple(kwargs.items()), ()), values


@examples(50)
@given(calls())
def test_reads_back_as_written(call: tuple[Op, dict[int, Value]]) -> None:
    text = signature(*call)
    assert "\n" not in text
    assert signature(*parse(text)) == text


MM = "aten.mm.default(float32[4,8]{8,1}, float32[8,2]{1,8})"


def test_is_readable_and_leaves_out_what_costs_nothing() -> None:
    values = {
        3: Value(3, (4, 8), (8, 1), "float32", storage=5, offset=16, name="x"),
        9: Value(9, (8, 2), (1, 8), "float32", storage=6),
    }
    op = Op(12, "aten.mm.default", (Ref(3), Ref(9)), (), (4,), phase="backward", module="head")
    assert signature(op, values) == MM
    step = Op(0, "aten.add_.Tensor", (Ref(3), Scalar("lr")), (("alpha", Scalar("beta")),), (3,))
    assert signature(step, values) == "aten.add_.Tensor(float32[4,8]{8,1}, $, alpha=$)"
    made = Op(0, "aten.empty.memory_format", ((2, 3),), (("device", Const("device", "cuda")),), (3,))
    assert signature(made, values) == "aten.empty.memory_format([2, 3], device=device:)"
