"""Every rule of loops refuses a graph that breaks it, sound loops pass, and nested ones have a text form."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.graph import Arg, Graph, Loop, Op, Ref, digest, dump, every_op, parse, verify
from magis.graph.loop_rules import REDUCTIONS
from magis.graph.verify import problems
from tests.graph.loop_graphs import (
    SOUND,
    Spoil,
    body_of,
    both,
    inner,
    named,
    one_line,
    op,
    parts,
    refuse,
    sound,
    storage,
    value,
    within,
    without,
)
from tests.graph.loop_mistakes import BROKEN
from tests.strategies import examples, written_graphs, written_ops


def test_sound_loops_pass() -> None:
    graph = sound()
    verify(graph)
    assert list(problems(graph)) == []


@pytest.mark.parametrize(("spoil", "message"), named(BROKEN))
def test_a_broken_rule_is_named(spoil: Spoil, message: str) -> None:
    refuse(spoil(sound()), message)


@pytest.mark.parametrize("how", REDUCTIONS)
def test_every_reduction_is_sound(how: str) -> None:
    verify(within(op(5, args=(Ref(3), Ref(7), how)))(sound()))


@pytest.mark.parametrize("how", REDUCTIONS)
def test_parts_of_half_precision_are_summed_in_single(how: str) -> None:
    half = within(value(7, dtype="bfloat16"), op(5, args=(Ref(3), Ref(7), how)))(sound())
    refused = [problem for problem in problems(half) if "merges bfloat16(6,) into float32(6,)" in problem]
    assert bool(refused) == (how not in ("sum", "mean"))


def test_one_part_is_a_loop_still() -> None:
    """A loop of one part may stand for what is not split (yet)."""
    text = re.sub(r"parts [23]", "parts 1", SOUND)
    graph = within(value(4, shape=(4, 6)), value(5, shape=(4, 6)), value(6, shape=(4,)))(parse(text))
    assert [line for line in problems(graph) if "magis.part" in line and "operator 0" in line]
    flat = without_inner(graph)
    sized = within(storage(4, nbytes=96), storage(5, nbytes=16), value(8, shape=(4,)), value(9, shape=(4,)))
    verify(sized(flat))


def without_inner(graph: Graph) -> Graph:
    """The inner loop as the sum that it is."""
    plain = Op(2, "aten.sum.dim_IntList", (Ref(5), (1,)), (), (6,), reads=((4, 0),))
    return within(lambda body: replace(body, ops=(*body.ops[:2], plain, *body.ops[3:])))(graph)


def test_a_tensor_may_be_given_to_a_loop_twice() -> None:
    """As two inputs of its body that show the same memory."""
    twice = both(
        op(0, args=(Ref(1), Ref(2), Ref(1))),
        within(lambda g: replace(g, inputs=(0, 1, 10, 2, 3), values={**g.values, 10: replace(g.values[0], id=10)})),
    )
    verify(twice(sound()))


def test_a_window_on_a_stretch_is_that_part_s_own() -> None:
    """Read or written through a view of the stretch: no part meets another one's."""
    window = Op(8, "aten.unsqueeze.default", (Ref(8), 1), (), (10,))
    spoil = within(
        lambda g: replace(g, values={**g.values, 10: replace(g.values[8], id=10, shape=(2, 1), stride=(1, 1))}),
        lambda g: replace(g, ops=(*g.ops[:7], window, replace(g.ops[7], args=(Ref(10), 0.5)))),
    )
    verify(spoil(sound()))


def test_a_result_without_elements_is_sound() -> None:
    spoil = both(
        storage(4, nbytes=0), value(4, shape=(0, 6), stride=(6, 1)),
        within(storage(3, nbytes=0), value(3, shape=(0, 6), stride=(6, 1)), value(7, shape=(0, 6), stride=(6, 1))),
    )  # fmt: skip
    verify(spoil(sound()))


def test_every_operator_comes_with_the_values_of_its_own_graph() -> None:
    graph = sound()
    seen = [(each.target, values) for each, values in every_op(graph)]
    assert [target for target, _ in seen] == [
        "magis.loop", "magis.part", "aten.exp.default", "magis.loop", "magis.part", "aten.sum.dim_IntList",
        "magis.reduce", "magis.join", "aten.sum.dim_IntList", "magis.reduce", "magis.part", "aten.mul_.Scalar",
        "aten.neg.default",
    ]  # fmt: skip
    body = body_of(graph, 0)
    assert [values for _, values in seen] == [
        graph.values, *[body.values] * 3, *[body_of(body, 2).values] * 3, *[body.values] * 5, graph.values
    ]  # fmt: skip


# --- the text form ----------------------------------------------------------------------------------------------------


def test_nested_loops_read_back() -> None:
    assert dump(sound()) == SOUND
    assert parse(dump(sound())) == sound()


def test_indentation_and_blank_lines_mean_nothing() -> None:
    text = SOUND.replace("\n", "\n\n  ")
    assert parse(text.replace("\n\n  storage", "\nstorage")) == sound()
    assert parse("\n".join(line.strip() for line in SOUND.splitlines())) == sound()


@pytest.mark.parametrize("change", [parts(4), within(parts(6, at=2)), inner(value(3, offset=1)), within(without(7))])
def test_the_digest_sees_changes_in_bodies(change: Spoil) -> None:
    assert digest(change(sound())) != digest(sound())


@st.composite
def written_loops(draw: st.DrawFn, depth: int = 0) -> Graph:
    """Graphs with bodies anywhere, sound or not."""
    graph = draw(written_graphs())
    ops = [*graph.ops]
    for at, each in enumerate(ops):
        if depth < 2 and draw(st.booleans()):
            body = Loop(draw(st.integers(1, 10**15)), draw(written_loops(depth + 1)))
            ops[at] = replace(each, body=body)
    return replace(graph, ops=(*ops, replace(draw(written_ops()), body=Loop(1, graph))))


@examples(40)
@given(written_loops())
def test_every_graph_reads_back_and_is_sound_or_refused_in_one_line(graph: Graph) -> None:
    text = dump(graph)
    assert parse(text) == graph
    assert dump(parse(text)) == text
    assert one_line(text) != ""


HEADER = "magis graph 1\n"
OPEN = "op 0 = magis.loop() parts 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("end\n", "line 2 of the graph: 'end' without a loop"),
        ("  end\n", "line 2 of the graph: 'end' without a loop"),
        (f"{OPEN}end\nend\n", "line 4 of the graph: 'end' without a loop"),
        ("end of story\n", "line 2 of the graph: unknown entry 'end'"),
        (OPEN, "line 2 of the graph: the text ends within the body of a loop"),
        (f"{OPEN}{OPEN}end\n", "line 4 of the graph: the text ends within the body of a loop"),
        (f"{OPEN}magis graph 1\n", "line 3 of the graph: unknown entry 'magis'"),
        (f"{OPEN}input\n", "line 3 of the graph: the line ends too early"),
        ("op 0 = magis.loop() parts 0\n", "line 2 of the graph: a loop has at least one part, not 0"),
        ("op 0 = magis.loop() parts -3\n", "line 2 of the graph: a loop has at least one part, not -3"),
        ("op 0 = magis.loop() parts\n", "line 2 of the graph: the line ends too early"),
        ("op 0 = magis.loop() parts two\n", "line 2 of the graph: expected a whole number, found 'two'"),
        ("op 0 = magis.loop() parts 2.5\n", "line 2 of the graph: expected a whole number, found '2.5'"),
        (f"op 0 = magis.loop() parts {10_000 * '9'}\n", "line 2 of the graph: expected a whole number, found"),
        (f"{19 * OPEN}{19 * 'end' + chr(10)}", "line 21 of the graph: unknown entry"),
        (20 * OPEN, "line 21 of the graph: loops nested more than 20 deep"),
        (100_000 * OPEN, "line 21 of the graph: loops nested more than 20 deep"),
        ("op 0 = magis.loop()\n", "operator 0 (magis.loop): a loop is called magis.loop and has a body"),
        ("op 0 = aten.f.default() parts 2\nend\n", "operator 0 (aten.f.default): a loop is called magis.loop and has"),
        (f"{OPEN}storage 1 generator 0\nend\n", "operator 0 (magis.loop): storage 1 is of kind 'generator' and has 0"),
    ],
)
def test_hostile_texts_give_one_line(text: str, message: str) -> None:
    assert one_line(HEADER + text).startswith(message)


def test_loops_may_be_nested_nineteen_deep() -> None:
    graph = parse(HEADER + 19 * OPEN + 19 * "end\n")
    verify(graph)
    assert parse(dump(graph)) == graph


def test_an_empty_body_is_sound() -> None:
    assert one_line(HEADER + OPEN + "end\n") == "sound"


def test_a_damaged_text_is_sound_or_refused_in_one_line() -> None:
    """Lines left out, doubled, exchanged; numbers changed."""
    lines = SOUND.splitlines()
    for gone in range(1, len(lines)):
        assert one_line("\n".join([*lines[:gone], *lines[gone + 1 :]]))
        assert one_line("\n".join([*lines[:gone], lines[gone], *lines[gone:]]))
    chosen = random.Random(0)
    for _ in range(600):
        numbers = list(re.finditer(r"-?\d+", SOUND[len(HEADER) :]))
        found = chosen.choice(numbers)
        new = chosen.choice(["0", "1", "2", "3", "4", "6", "9", "99", "-1"])
        start, end = found.start() + len(HEADER), found.end() + len(HEADER)
        assert one_line(SOUND[:start] + new + SOUND[end:])


@pytest.mark.parametrize("arg", [None, "sum", 0, True, (Ref(0),), Ref(0), 1.5])
@pytest.mark.parametrize("target", ["magis.part", "magis.join", "magis.reduce", "magis.loop"])
def test_any_arguments_of_our_own_operators_are_sound_or_refused(target: str, arg: Arg) -> None:
    for args in (
        (),
        (arg,),
        (Ref(0), arg),
        (Ref(2), Ref(6), arg),
        (Ref(99), Ref(2), arg),
        (Ref(0), Ref(1), Ref(2), arg),
    ):
        for at in range(8):
            graph = within(op(at, target=target, args=args))(sound())
            assert all(len(line.splitlines()) == 1 for line in problems(graph))
