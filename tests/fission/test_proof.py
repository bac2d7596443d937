"""Loops are proven by undoing them: sound ones pass, and a change to one makes it another computation or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from magis.errors import VerifyError
from magis.fission.proof import loop_proof_problems, verify_fission
from magis.graph import Graph, Op, Ref, parse, verify
from magis.graph.loop_rules import REDUCTIONS, merged_dtype
from tests.fission.cutout import differences, draw, outcome
from tests.fission.draws import NETWORKS, drawn, nested
from tests.fission.mutants import mutants
from tests.graph.loop_graphs import op, sound, within
from tests.runtime import loop_graphs
from tests.runtime.test_loops import learner

MIB = 1 << 20
ALWAYS = ("join_along_another", "join_reduced", "reduce_otherwise", "other_rows")
"""Changes that no proof may let pass. A stretch of another dimension is the same to a sum of all."""


def proof_problems(graph: Graph) -> list[str]:
    return [problem for each in graph.ops for problem in loop_proof_problems(graph, each)]


def test_loops_by_hand_are_proven() -> None:
    written = [*loop_graphs.VIEWS, *loop_graphs.COPIES[:-1], *loop_graphs.REDUCTIONS.values(), loop_graphs.nested()]
    for graph in (sound(), *(each.graph for each in written)):
        if "new_full" not in str(graph.ops):
            verify_fission(graph)


def test_a_region_is_the_step_that_it_was() -> None:
    graph, looped = learner()
    verify_fission(looped, graph)


PLAIN = """magis graph 1
storage 1 batch 96
storage 2 temporary 96
value 1 @1 float32 [4, 6] {6, 1} +0
value 2 @2 float32 [4, 6] {6, 1} +0
input 1
op 0 %2 = aten.neg.default(%1) reads 1:0 phase forward
output 2
"""


def refusal(graph: Graph, original: str) -> str:
    with pytest.raises(VerifyError) as caught:
        verify_fission(graph, parse(original))
    return str(caught.value)


def test_another_step_is_named() -> None:
    looped = loop_graphs.pointwise(loop_graphs.Looks((4, 6)), 0, 2, view=True).graph
    verify_fission(looped, parse(PLAIN))
    assert refusal(looped, PLAIN.replace("neg", "abs")) == "the step computes its result 2 otherwise than the original"
    halved = "op 1 = aten.mul_.Scalar(%1, 0.5) reads 1:0 writes 1:1 phase forward\noutput"
    assert refusal(looped, PLAIN.replace("output", halved)) == "the step writes other contents than the original"


# --- what is wrong with a loop, by hand -------------------------------------------------------------------------------

LOOP = "operator 0 (magis.loop)"
INNER = f"{LOOP}: operator 2 (magis.loop)"
OF_SIX, OF_TWO = (f"of float32({size},), but it is a part of a sum" for size in (6, 2))
CASES: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "sums joined": (
        within(lambda g: replace(op(5, target="magis.join", args=(Ref(3), Ref(7), 0))(g))),
        f"{LOOP}, operator 5 (magis.join): takes value 7 for cut along 0 {OF_SIX}",
    ),
    "a mean of sums": (
        within(op(5, args=(Ref(3), Ref(7), "mean"))),
        f"{LOOP}, operator 5 (magis.reduce): takes value 7 for a part of a mean {OF_SIX}",
    ),
    "an exponential of a sum": (
        within(lambda g: replace(
            g, values={**g.values, 10: replace(g.values[7], id=10)},
            ops=(*g.ops[:5], Op(10, "aten.exp.default", (Ref(7),), (), (10,), reads=((6, 0),)),
                 replace(g.ops[5], args=(Ref(3), Ref(10), "sum")), *g.ops[6:]),
        )),
        f"{LOOP}, operator 10 (aten.exp.default): is a part of no whole call with %7 a part of a sum",
    ),
    "a part of a part": (
        within(op(6, args=(Ref(4), 1))),
        f"{LOOP}, operator 6 (magis.part): takes a stretch of value 4, which is no whole tensor",
    ),
    "an unsound loop within": (
        within(within(op(2, args=(Ref(1), Ref(3), "max")), at=2)),
        f"{INNER}, operator 2 (magis.reduce): takes value 3 for a part of a max {OF_TWO}",
    ),
    "random numbers": (
        within(op(1, random=True)),
        f"{LOOP}, operator 1 (aten.exp.default): is a part of no whole call with %4 cut along 0",
    ),
    "a host's operator": (
        within(op(1, target="magis.rng_save")),
        f"{LOOP}, operator 1 (magis.rng_save): is a part of no whole call with %4 cut along 0",
    ),
    "a softmax along the cut": (
        within(op(1, target="aten._softmax.default", args=(Ref(4), 0, False))),
        f"{LOOP}, operator 1 (aten._softmax.default): is a part of no whole call with %4 cut along 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_whole_is_named(name: str) -> None:
    spoil, message = CASES[name]
    graph = spoil(sound())
    assert proof_problems(graph)[:1] == [message]
    with pytest.raises(VerifyError) as caught:
        verify_fission(graph)
    assert str(caught.value) == message


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("written", loop_graphs.REDUCTIONS)
def test_a_reduction_fits_no_other_parts(how: str, written: str) -> None:
    graph = loop_graphs.REDUCTIONS[written].graph
    if written.startswith((how, "same")) or merged_dtype(written.rpartition("-")[2], how) != graph.values[2].dtype:
        return
    changed = within(op(2, args=(Ref(2), Ref(4), how)))(graph)
    verify(changed)
    known = f"of {graph.values[2].dtype}(6,), but it is {words(written.split('-', maxsplit=1)[0])}"
    where = f"{LOOP}, operator 2 (magis.reduce)"
    assert proof_problems(changed) == [f"{where}: takes value 4 for {words(how)} {known}"]


def words(how: str) -> str:
    return "whole" if how == "same" else f"a part of a {how}"


# --- random loops, changed --------------------------------------------------------------------------------------------


def check_mutants(name: str, seed: int, count: int, most_bytes: int) -> tuple[int, int]:
    """Changed loops of a random fission: what the proof lets pass computes the same. How many were refused, passed."""
    fission = drawn(name, seed, most_bytes=most_bytes)
    fission = (nested(fission, seed) if seed % 2 else None) or fission
    whole, looped = fission.pair
    memory = draw(whole, seed)
    expected = outcome(whole, memory)
    refused = passed = 0
    for kind, mutant in mutants(looped, seed, count):
        try:
            verify_fission(mutant, whole)
        except VerifyError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017  (both outcomes are fine)
            refused += 1
            continue
        assert kind not in ALWAYS, f"{kind} in {name} {seed}"
        assert differences(expected, outcome(mutant, memory), whole) == []
        passed += 1
    return refused, passed


@pytest.mark.parametrize("name", NETWORKS)
def test_changed_loops_are_refused_or_the_same(name: str) -> None:
    refused, passed = check_mutants(name, len(name), 14, MIB)
    assert refused >= 6 * passed


@pytest.mark.soak
@pytest.mark.parametrize("name", NETWORKS)
def test_many_changed_loops_are_refused_or_the_same(name: str) -> None:
    counts = [check_mutants(name, 500 + seed, 40, 8 * MIB) for seed in range(20)]
    assert sum(refused for refused, _ in counts) >= 10 * sum(passed for _, passed in counts)
